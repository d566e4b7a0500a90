"""ONNX files as sources: whole ones, broken ones, and how their inputs are settled."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.config import ModelConfig
from pipeline.errors import ConfigError, SourceError, Unsupported
from pipeline.export import OnnxSource, load_source

Configured = Callable[..., ModelConfig]


def write(
    path: Path, shape: list[int | str | None] | None, dtype: int = TensorProto.FLOAT, external: bool = False
) -> None:
    weight = numpy_helper.from_array(np.ones((4, 300), np.float32), "weight")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weight"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", dtype, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [weight],
    )
    graph.input.append(helper.make_tensor_value_info("weight", TensorProto.FLOAT, [4, 300]))  # as old exporters do
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    if external:
        onnx.save(model, path, save_as_external_data=True, location="weights.bin")
    else:
        onnx.save(model, path)


def load(configured: Configured, **model: Any) -> OnnxSource:
    source = load_source(configured(onnx="m.onnx", **model))
    assert isinstance(source, OnnxSource)
    return source


def refusal(configured: Configured, kind: type[Exception] = SourceError, **model: Any) -> str:
    with pytest.raises(kind) as caught:
        load(configured, **model)
    return str(caught.value)


def test_a_static_file_tells_everything(configured: Configured, tmp_path: Path) -> None:
    write(tmp_path / "m.onnx", [2, 4])
    source = load(configured)
    assert [str(spec) for spec in source.inputs] == ["x: float32[2, 4]"]
    assert source.outputs == ("y",)
    assert source.path == tmp_path / "m.onnx"


def test_open_dims_may_be_sized_or_declared(configured: Configured, tmp_path: Path) -> None:
    write(tmp_path / "m.onnx", ["N", 4])
    assert load(configured).inputs[0].shape == ("N", 4)
    assert load(configured, dims={"N": [2]}).inputs[0].shape == ("N", 4)
    assert load(configured, inputs={"x": {"shape": ["batch", 4]}}).inputs[0].shape == ("batch", 4)
    assert load(configured, inputs={"x": {"shape": [1, 4]}}).inputs[0].shape == (1, 4)
    assert load(configured, dims={"N": [2]}, inputs={"x": {"range": [5, 6]}}).inputs[0].low == 5


def test_unnamed_dims_count_as_one(configured: Configured, tmp_path: Path) -> None:
    write(tmp_path / "m.onnx", [None, 4])
    assert [str(spec) for spec in load(configured).inputs] == ["x: float32[?, 4]"]
    write(tmp_path / "m.onnx", None)
    assert refusal(configured) == "input 'x' of m.onnx has no shape, not even a rank; declare model.inputs.x.shape"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"xs": {}}, "model.inputs: m.onnx has no input 'xs'; did you mean 'x'?"),
        ({"weight": {}}, "model.inputs: m.onnx has no input 'weight'; it has: x"),
        ({"x": {"shape": [2, 5]}}, "input 'x' of m.onnx has the shape [N, 4], but model.inputs says [2, 5]"),
        ({"x": {"dtype": "int64"}}, "input 'x' of m.onnx is float32, but model.inputs.x says int64"),
    ],
)
def test_declarations_are_checked(configured: Configured, tmp_path: Path, inputs: dict[str, Any], message: str) -> None:
    write(tmp_path / "m.onnx", ["N", 4])
    assert refusal(configured, inputs=inputs, dims={"N": [2]}) == message


def test_a_dim_that_the_file_does_not_have(configured: Configured, tmp_path: Path) -> None:
    write(tmp_path / "m.onnx", ["N", 4])
    message = refusal(configured, ConfigError, dims={"N": [2], "M": [2]})
    assert message == "model.dims: no input has a dim named 'M'; the named dims are: N"


def test_a_missing_file(configured: Configured, tmp_path: Path) -> None:
    assert refusal(configured).startswith(f"no file or folder '{tmp_path}/m.onnx'")


@pytest.mark.parametrize("content", [b"", b"hello, world", b"\x08\x08\x12"])
def test_not_an_onnx_file(configured: Configured, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    assert re.search("is not a readable ONNX file|holds no graph", refusal(configured))


def test_a_truncated_file(configured: Configured, tmp_path: Path) -> None:
    write(tmp_path / "m.onnx", [2, 4])
    data = (tmp_path / "m.onnx").read_bytes()
    (tmp_path / "m.onnx").write_bytes(data[: len(data) // 2])
    assert f"is not a readable ONNX file ({len(data) // 2} bytes" in refusal(configured)


def test_external_data_is_checked(configured: Configured, tmp_path: Path) -> None:
    write(tmp_path / "m.onnx", [2, 4], external=True)
    assert load(configured).outputs == ("y",)
    data = (tmp_path / "weights.bin").read_bytes()
    (tmp_path / "weights.bin").write_bytes(data[:100])
    assert "weights.bin ends before initializer 'weight' does (100 bytes, needs 4800)" in refusal(configured)
    (tmp_path / "weights.bin").unlink()
    assert "weights.bin of initializer 'weight' is missing" in refusal(configured)


def test_external_data_outside_of_the_folder(configured: Configured, tmp_path: Path) -> None:
    write(tmp_path / "m.onnx", [2, 4], external=True)
    data = (tmp_path / "m.onnx").read_bytes()
    (tmp_path / "m.onnx").write_bytes(data.replace(b"weights.bin", b"../etc/pass"))
    assert "initializer 'weight' points to '../etc/pass', outside of the model's folder" in refusal(configured)


def test_inputs_that_cannot_be_drawn(configured: Configured, tmp_path: Path) -> None:
    write(tmp_path / "m.onnx", [2, 4], dtype=TensorProto.STRING)
    assert refusal(configured, Unsupported).startswith("input 'x' is string; inputs can be drawn for float64")
