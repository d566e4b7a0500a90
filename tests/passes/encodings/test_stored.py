"""A stored tensor that was made of others becomes the whole numbers that they become, moved in the same way."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

from passes import optimize
from passes.context import PassContext
from passes.encodings.encoding import Encoding, Precision
from passes.encodings.from_qdq import read_qdq
from passes.encodings.stored import EncodedArray, NoEncoding, derive_encoding
from passes.errors import UsageError
from passes.weights.detached import DetachedModel
from pipeline.config.quantsim import parse_precision
from pipeline.quantsim.encodings import encode_weight, quantize
from tests.support.onnx_models import detached, model_of
from tests.support.onnx_text import ATTENTION, merged_model

WEIGHT = np.random.default_rng(0).standard_normal((8, 12)).astype(np.float32)
OTHER = 3 * np.random.default_rng(1).standard_normal((8, 12)).astype(np.float32)
KERNEL = np.random.default_rng(2).standard_normal((4, 6, 3, 3)).astype(np.float32)


def encode(array: np.ndarray, text: str, axis: int) -> Encoding:
    precision = parse_precision(text)
    assert precision is not None
    return encode_weight(array, precision, axis)


def source(array: np.ndarray, text: str, axis: int, name: str = "w") -> EncodedArray:
    return EncodedArray(name, array, encode(array, text, axis))


MOVES: dict[str, tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]] = {
    "turned": (WEIGHT, lambda array: array.T),
    "rows": (WEIGHT, lambda array: array[4:]),
    "columns": (WEIGHT, lambda array: array[:, 4:8]),
    "turned columns": (WEIGHT, lambda array: array[:, 4:8].T),
    "mixed columns": (WEIGHT, lambda array: array[:, [0, 3, 6, 9]]),
    "with axes of one": (WEIGHT, lambda array: array.T[:, :, None, None]),
    "a kernel's channels": (KERNEL, lambda array: array[2:4]),
    "a kernel turned": (KERNEL, lambda array: array.transpose(1, 0, 2, 3)),
}
FORMATS = [("int8", 0), ("int8/channel", 0), ("int8/channel", 1), ("uint8/channel", 1), ("int4/block2", 0)]


@pytest.mark.parametrize(("text", "axis"), FORMATS)
@pytest.mark.parametrize("move", MOVES)
def test_whole_numbers_move_as_the_floats_do(move: str, text: str, axis: int) -> None:
    array, change = MOVES[move]
    before = source(array, text, axis)
    encoding, sources = derive_encoding(np.ascontiguousarray(change(array)), [before])
    assert sources == ("w",)
    wanted = change(quantize(array, before.encoding))
    np.testing.assert_array_equal(quantize(np.ascontiguousarray(change(array)), encoding), wanted)
    back = change(before.encoding.spread(array, before.encoding.scale) * np.ones_like(array))
    moved = np.ascontiguousarray(change(array))
    np.testing.assert_array_equal(encoding.spread(moved, encoding.scale) * np.ones_like(moved), back)


@pytest.mark.parametrize(("text", "axis"), [("int8/channel", 1), ("int4/block4", 1), ("int4/block4", 0)])
def test_weights_side_by_side_keep_their_scales(text: str, axis: int) -> None:
    sources = [source(WEIGHT, text, axis, "q"), source(OTHER, text, axis, "k")]
    joined = np.concatenate([OTHER, WEIGHT], axis=1)
    encoding, names = derive_encoding(joined, sources)
    assert names == ("k", "q")
    wanted = np.concatenate([quantize(one.array, one.encoding) for one in reversed(sources)], axis=1)
    np.testing.assert_array_equal(quantize(joined, encoding), wanted)


FACTORS = np.array([0.3, -2.5, 1.0, 7.1, -0.01, 1.9, 40.0, 0.7], np.float32)


@pytest.mark.parametrize(
    ("text", "axis"), [("int8/channel", 0), ("uint8/channel", 0), ("int4/block4", 1), ("int5/channel", 0)]
)
@pytest.mark.parametrize(
    "array", [WEIGHT, KERNEL.transpose(1, 0, 2, 3)[[0, 1, 2, 3, 4, 5, 0, 1]]], ids=["rows", "kernel"]
)
def test_factors_of_channels_go_into_their_scales(text: str, axis: int, array: np.ndarray) -> None:
    array = np.ascontiguousarray(array)
    before = source(array, text, axis)
    factors = FACTORS.reshape(-1, *[1] * (array.ndim - 1))
    found, sources = derive_encoding(array * factors, [before])
    assert sources == ("w",)
    scales, zeros = (before.encoding.spread(array, one) for one in (before.encoding.scale, before.encoding.zero_point))
    numbers = quantize(array * factors, found) - found.spread(array, found.zero_point)
    np.testing.assert_array_equal(numbers, np.sign(factors) * (quantize(array, before.encoding) - zeros))
    every = np.ones_like(array)
    np.testing.assert_allclose(found.spread(array, found.scale) * every, np.abs(factors) * scales * every, rtol=1e-6)


def test_a_lowest_number_that_a_negative_factor_would_mirror_is_refused() -> None:
    precision = Precision(8, signed=True, symmetric=False, granularity="channel")
    every = Precision(8, signed=True, symmetric=True, granularity="channel")
    array = np.array([[-1.28, 0.5], [0.3, 1.0]], np.float32)
    scale, zero = np.full(2, 0.01, np.float32), np.zeros(2, np.int64)
    mirrored, _ = derive_encoding(-array, [EncodedArray("w", array, Encoding(precision, scale, zero, 0))])
    np.testing.assert_array_equal(mirrored.zero_point, [-1, -1])
    with pytest.raises(NoEncoding, match="a negative factor turns its lowest number"):
        derive_encoding(-array, [EncodedArray("w", array, Encoding(every, scale, zero, 0))])


@pytest.mark.parametrize(
    ("array", "sources", "why"),
    [
        (WEIGHT + np.float32(1e-3), [source(WEIGHT, "int8/channel", 1)], "its values are changed"),
        (FACTORS[:, None] * WEIGHT, [source(WEIGHT, "int8", 1)], "multiplied by a factor of its own"),
        (FACTORS[:, None] * WEIGHT, [source(WEIGHT, "int8/channel", 1)], "multiplied by a factor of its own"),
        (0 * WEIGHT, [source(WEIGHT, "int8/channel", 1)], "a factor of zero"),
        (FACTORS * FACTORS, [source(FACTORS, "int8/channel", 0)], "its values are changed"),
        (np.concatenate([WEIGHT, OTHER], 1), [source(WEIGHT, "int8", 1, "q"), source(OTHER, "int8", 1, "k")],
         "it is joined of 'q', 'k', which have other scales"),
        (np.concatenate([WEIGHT, OTHER], 0),
         [source(WEIGHT, "int8/channel", 1, "q"), source(OTHER, "int8/channel", 1, "k")],
         "it is joined of 'q', 'k', which have other scales"),
        (WEIGHT[:, 2:8], [source(WEIGHT, "int4/block4", 1)], "it is cut through blocks of 4"),
        (WEIGHT.reshape(8, 3, 4), [source(WEIGHT, "int8/channel", 1)], "are no axis of it any more"),
    ],
)  # fmt: skip
def test_what_has_no_encoding_says_why(array: np.ndarray, sources: list[EncodedArray], why: str) -> None:
    with pytest.raises(NoEncoding, match=why):
        derive_encoding(np.ascontiguousarray(array), sources)


# Quantized models as tools write them, and the float tensors that their encodings are for.

NAMES = {
    "onnxline": ("h", "h_quantized", "h_dequantized", "w_quantized", "w_dequantized"),
    "onnxruntime": (
        "h",
        "h_QuantizeLinear_Output",
        "h_DequantizeLinear_Output",
        "w_quantized",
        "w_DequantizeLinear_Output",
    ),
    "onnxsim": ("h/f", "h/q", "h", "w/qdq21/int8", "w/qdq21/dq"),
    "NNCF": ("h", "q_output_h_1", "dq_output_h_1", "q_output_w_1", "dq_output_w_1"),
}
"""Tool → its names of a float value, the same quantized and dequantized, and of a stored weight."""


def tools_model(tool: str) -> DetachedModel:
    value, numbers, back, stored, weight = (f"name_{index}" for index in range(5))
    text = f"""
    g (float[2, 4] x) => (float[2, 3] y) {{
        {value} = Relu (x)
        {numbers} = QuantizeLinear ({value}, s, z)
        {back} = DequantizeLinear ({numbers}, s, z)
        {weight} = DequantizeLinear <axis = 1> ({stored}, ws, wz)
        y = MatMul ({back}, {weight})
    }}"""
    whole = np.arange(12).reshape(4, 3).astype(np.int8)
    scales = {"s": np.array(0.5, np.float32), "ws": np.array([1, 2, 3], np.float32)}
    model = model_of(text, name_3=whole, z=np.array(7, np.uint8), wz=np.zeros(3, np.int8), **scales)
    spelled = dict(zip((value, numbers, back, stored, weight), NAMES[tool], strict=True))
    for tensor in model.graph.initializer:
        tensor.name = spelled.get(tensor.name, tensor.name)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [spelled.get(name, name) for name in names]
    del model.graph.value_info[:]
    return detached(model)


@pytest.mark.parametrize("tool", NAMES)
def test_the_names_of_tools(tool: str) -> None:
    found = read_qdq(tools_model(tool))
    assert found.keys() == {"h", "w"}
    assert (str(found["h"].precision), float(found["h"].scale), int(found["h"].zero_point)) == ("uint8", 0.5, 7)
    assert (str(found["w"].precision), found["w"].axis, found["w"].scale.tolist()) == ("int8/channel", 1, [1, 2, 3])


TWICE = """
g (float[2] x) => (float[2] y) {
    a = QuantizeLinear (x, s, z)
    b = DequantizeLinear (a, s, z)
    c = QuantizeLinear (x, t, z)
    d = DequantizeLinear (c, t, z)
    y = Add (b, d)
}
"""
COMPUTED = """
g (float[2] x, float s) => (float[2] y) {
    a = QuantizeLinear (x, s, z)
    y = DequantizeLinear (a, s, z)
}
"""


def test_a_tensor_with_two_encodings_is_refused() -> None:
    model = model_of(TWICE, s=np.array(1, np.float32), t=np.array(2, np.float32), z=np.array(0, np.uint8))
    with pytest.raises(UsageError, match="quantizes 'x' in two ways"):
        read_qdq(detached(model))


def test_a_scale_that_is_computed_is_refused() -> None:
    with pytest.raises(UsageError, match="'s' is computed; expected a constant"):
        read_qdq(detached(model_of(COMPUTED, z=np.array(0, np.uint8))))


# A product with a part of a merged matrix has the encoding of the whole one, also if one position is all there is.

MERGED = """g (float[1, 32, 1, 1] x) => (float[1, 1, 1, 32] y)
    <float[32, 32, 1, 1] conv, float[32] scale, float[32] shift, float[32] mean, float[96, 32] w, float[96] b> {
    c = Conv (x, conv)
    variance = Mul (scale, scale)
    h = BatchNormalization (c, scale, shift, mean, variance)
    row = Reshape (h, #[1, 1, 1, 32])
    turned = Transpose <perm = [1, 0]> (w)
    product = MatMul (row, turned)
    sum = Add (product, b)
    q, k, v = Split <axis = 3> (sum, #[32, 32, 32])"""
"""BatchNormalization becomes a part of Conv, so that no number after it is the same in every bit."""

RECIPE = ("fold_constants", "fold-batchnorm", "split-qkv")


def encoding_of(scale: float) -> Encoding:
    precision = Precision(16, signed=False, symmetric=False)
    return Encoding(precision, np.array(scale, np.float32), np.array(2**15))


def model_with(text: str) -> onnx.ModelProto:
    return merged_model(text + ATTENTION + "}")


NAMES_OF_PARTS = ("x", "h", "w", "product", "sum", "q", "k", "v")

ENCODINGS = {name: encoding_of(0.01 * place) for place, name in enumerate(NAMES_OF_PARTS, 1)}


def test_each_part_of_one_position_has_the_encoding_of_the_whole(context: PassContext) -> None:
    run = optimize(model_with(MERGED), RECIPE, encodings=ENCODINGS, context=context)
    assert run.encodings is not None
    for role in "qkv":
        assert run.encodings.encodings[f"product.{role}"] == ENCODINGS["product"]
        assert run.encodings.sources[f"product.{role}"] == ("product",)
        assert run.encodings.sources[f"w.{role}_transposed"] == ("w",)
    assert "product" not in {lost.tensor for lost in run.encodings.lost}


def test_a_matrix_that_is_not_traced_says_nothing_of_its_parts(context: PassContext) -> None:
    given = {name: encoding for name, encoding in ENCODINGS.items() if name != "w"}
    run = optimize(model_with(MERGED), RECIPE, encodings=given, context=context)
    assert run.encodings is not None
    assert "product.q" in {uncovered.tensor for uncovered in run.encodings.uncovered}
