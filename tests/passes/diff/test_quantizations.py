"""A diff of a model in floats and of its quantized form has one line for each tensor."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from passes.diff import compare_models, diff_text
from tests.support.onnx_models import detached, matrix

FLOATS = "g (float[4, 32] x) => (float[4, 8] y) { h = MatMul (x, w) y = Relu (h) }"
PER_TENSOR = "int8[32, 8] i, float s = {0.01}, int8 z = {3}"

FORMS = {
    "per tensor": (
        PER_TENSOR,
        "w1 = DequantizeLinear (i, s, z) h = MatMul (x, w1) y = Relu (h)",
        "stored tensor w quantized: int8 per tensor, scale 0.01, zero point 3; off by up to 0.00496",
    ),
    "a Constant as scale": (
        "int8[32, 8] i, int8 z = {3}",
        "s = Constant <value = float {0.01}> () w1 = DequantizeLinear (i, s, z) h = MatMul (x, w1) y = Relu (h)",
        "stored tensor w quantized: int8 per tensor, scale 0.01, zero point 3; off by up to 0.00496",
    ),
    "per channel": (
        "int8[32, 8] i, float[8] s, int8[8] z",
        "w1 = DequantizeLinear <axis = 1> (i, s, z) h = MatMul (x, w1) y = Relu (h)",
        "stored tensor w quantized: int8 per channel, 8 scales; off by up to 0.00496",
    ),
    "per block": (
        "int8[32, 8] i, float[2, 8] s, int8[2, 8] z",
        "w1 = DequantizeLinear <axis = 0, block_size = 16> (i, s, z) h = MatMul (x, w1) y = Relu (h)",
        "stored tensor w quantized: int8 in blocks of 16; off by up to 0.00496",
    ),
    "a value": (
        "float[32, 8] w, float s = {0.05}, uint8 z = {128}",
        "h = MatMul (x, w) h1 = QuantizeLinear (h, s, z) h2 = DequantizeLinear (h1, s, z) y = Relu (h2)",
        "value h quantized: uint8 per tensor, scale 0.05, zero point 128",
    ),
    "a value that is clipped first": (
        "float[32, 8] w, float s = {0.05}, uint8 z = {128}, float low = {-1.0}, float high = {1.0}",
        "h = MatMul (x, w) h0 = Clip (h, low, high) h1 = QuantizeLinear (h0, s, z) h2 = DequantizeLinear (h1, s, z) "
        "y = Relu (h2)",
        "value h quantized: uint8 per tensor, scale 0.05, zero point 128",
    ),
}


def floats(opset: int = 21) -> onnx.ModelProto:
    return parsed(FLOATS, {"w": matrix(32, 8, 0)}, opset)


def quantized(form: str, shift: int = 0) -> onnx.ModelProto:
    """The weight in steps of 0.01, less `shift` steps."""
    declared, body, _ = FORMS[form]
    steps = np.round(matrix(32, 8, 0) / np.float32(0.01)).astype(np.int8) + np.int8(3 - shift)
    stored = {"i": steps, "s": np.float32(0.01), "z": np.int8(3), "w": matrix(32, 8, 0)}
    return parsed(f"g (float[4, 32] x) => (float[4, 8] y) <{declared}> {{ {body} }}", stored)


def parsed(text: str, stored: dict[str, np.ndarray], opset: int = 21) -> onnx.ModelProto:
    """The model of `text`, in which each declared tensor is one of `stored`, repeated where it is a number."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]>' + text)
    shapes = {info.name: [dim.dim_value for dim in info.type.tensor_type.shape.dim] for info in model.graph.value_info}
    del model.graph.value_info[:]
    shapes |= {} if shapes else {name: list(array.shape) for name, array in stored.items()}
    for name, shape in shapes.items():
        array = np.broadcast_to(np.asarray(stored[name]), shape)
        model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
    return model


def lines(before: onnx.ModelProto, after: onnx.ModelProto) -> list[str]:
    text = diff_text(compare_models(detached(before), detached(after)))
    return [line.strip() for line in text.splitlines() if line.startswith("  ")]


@pytest.mark.parametrize("form", FORMS)
def test_one_line_for_each_tensor(form: str) -> None:
    assert lines(floats(), quantized(form)) == [FORMS[form][2]]
    assert lines(quantized(form), quantized(form)) == []


def test_a_weight_of_other_numbers_shows() -> None:
    (line,) = lines(floats(), quantized("per channel", shift=4))
    assert line == "stored tensor w quantized: int8 per channel, 8 scales; off by up to 0.045"


def test_another_scale_of_a_quantized_tensor_is_a_change_of_that_scale() -> None:
    after = quantized("per channel")
    scale = next(tensor for tensor in after.graph.initializer if tensor.name == "s")
    scale.CopyFrom(numpy_helper.from_array(np.full(8, 0.02, np.float32), "s"))
    assert lines(quantized("per channel"), after) == ["s float[8]: 8 of 8 values differ, by up to 0.01"]


def test_what_goes_beside_a_quantization_is_told_too() -> None:
    after = quantized("a value")
    after.graph.node.append(onnx.helper.make_node("Neg", ["y"], ["n"]))
    after.graph.output.append(onnx.helper.make_tensor_value_info("n", onnx.TensorProto.FLOAT, [4, 8]))
    assert "added Neg n" in lines(floats(), after)
