"""Which initializers of the final model are the module's parameters."""

from __future__ import annotations

from pathlib import Path

import onnx

from passes.weights.detached import read_model
from pipeline.stages.export import keys_of_parameters
from pipeline.stages.runtime import find_trainable

TEXT = """<ir_version: 10, opset_import: ["": 20]>
g (float[2, 2] x) => (float[2, 2] y) <float[2] bias = {0, 0}, int64[1] start = {0}, int64[1] end = {2}> {
    s = Slice (x, start, end)
    y = Add (s, bias)
}"""


def test_two_zeros_of_float32_are_not_the_start_of_a_slice(tmp_path: Path) -> None:
    """They have the same eight bytes; a start that may be trained is no constant, and was refused (SAM)."""
    onnx.save(onnx.parser.parse_model(TEXT), tmp_path / "model.onnx")
    parameters = keys_of_parameters(read_model(tmp_path / "model.onnx"), frozenset({"bias"}))
    assert find_trainable(tmp_path / "model.onnx", parameters, ()) == {"bias"}
