"""Nodes of one name get names of their own at the door."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime
import pytest

from passes.graph.traversal import rename_twins
from passes.weights.detached import attach, open_model


def model_with(names: list[str]) -> onnx.ModelProto:
    body = "x0 = Relu (x)" + "".join(f" x{at + 1} = Neg (x{at})" for at in range(len(names) - 1))
    text = f"g (float[N] x) => (float[N] x{len(names) - 1}) {{ {body} }}"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}')
    for node, name in zip(model.graph.node, names, strict=True):
        node.name = name
    return model


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["n", "n", "n"], ["n", "n_2", "n_3"]),
        (["n", "n_2", "n", "n"], ["n", "n_2", "n_3", "n_4"]),
        (["", "n", "", "n_2"], ["", "n", "", "n_2"]),
        (["n", "n", "n_2", "n_2"], ["n", "n_3", "n_2", "n_2_2"]),
    ],
)
def test_names(names: list[str], expected: list[str], tmp_path: Path) -> None:
    model = model_with(names)
    rename_twins(model.graph)
    assert [node.name for node in model.graph.node] == expected
    onnx.save(model_with(names), tmp_path / "model.onnx")
    for opened in (open_model(tmp_path / "model.onnx"), open_model(model_with(names))):
        assert [node.name for node in opened.proto.graph.node] == expected
        onnxruntime.InferenceSession(attach(opened).SerializeToString(), providers=["CPUExecutionProvider"])
