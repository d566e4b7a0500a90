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
    replace_tensor(after, "s", np.full(8, 0.02, np.float32))
    [line] = lines(quantized("per channel"), after)
    assert line == "stored tensor w1 quantized otherwise: int8/channel: 8 of 8 scales differ, by up to 1 of it"


def replace_tensor(model: onnx.ModelProto, name: str, array: np.ndarray) -> None:
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    tensor.CopyFrom(numpy_helper.from_array(array, name))


def test_scales_are_compared_in_units_of_the_last_place() -> None:
    after = quantized("a value")
    replace_tensor(after, "s", np.nextafter(np.float32(0.05), np.float32(1)))
    replace_tensor(after, "z", np.uint8(127))
    [line] = lines(quantized("a value"), after)
    assert line == "value h quantized otherwise: uint8: scale 0.05 → 0.05, by 1 ulp, zero point 128 → 127"


def test_whole_numbers_of_one_scale_are_compared() -> None:
    [line] = lines(quantized("per channel"), quantized("per channel", shift=4))
    assert line.endswith("int8/channel: 256 of 256 integers differ, by up to 4")


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ("per tensor", "per channel", "stored tensor w1 quantized otherwise: int8 → int8/channel"),
        ("per channel", "per block", "stored tensor w1 quantized otherwise: int8/channel → int8/block16"),
    ],
)
def test_another_format_is_one_line(before: str, after: str, change: str) -> None:
    assert lines(quantized(before), quantized(after)) == [change]


def test_fewer_bits_are_one_line_with_their_clip() -> None:
    """As `onnxline quantsim` writes them: 64 numbers, of which 32 is zero."""
    declared, body, _ = FORMS["a value that is clipped first"]
    text = declared.replace("-1.0", "-1.6").replace("{1.0}", "{1.55}").replace("128", "32")
    body = body.replace("h0", "h_clipped")
    stored = {"s": np.float32(0.05), "z": np.uint8(32), "low": np.float32(-1.6), "high": np.float32(1.55)}
    narrow = parsed(f"g (float[4, 32] x) => (float[4, 8] y) <{text}> {{ {body} }}", stored | {"w": matrix(32, 8, 0)})
    wide = quantized("a value")
    assert lines(wide, narrow) == ["value h quantized otherwise: uint8 → uint6"]
    assert lines(narrow, wide) == ["value h quantized otherwise: uint6 → uint8"]


def test_a_tensor_that_is_no_more_quantized_is_one_line() -> None:
    assert lines(quantized("a value"), floats()) == ["value h quantized otherwise: uint8 → float"]
    assert lines(quantized("per channel"), floats()) == ["stored tensor w1 quantized otherwise: int8/channel → float"]


def test_what_goes_beside_a_quantization_is_listed_too() -> None:
    after = quantized("a value")
    after.graph.node.append(onnx.helper.make_node("Neg", ["y"], ["n"]))
    after.graph.output.append(onnx.helper.make_tensor_value_info("n", onnx.TensorProto.FLOAT, [4, 8]))
    assert "added Neg n" in lines(floats(), after)
