"""Scales and zero points against onnxruntime's own functions, and what a number loses in its format."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto
from onnxruntime.quantization.quant_utils import compute_scale_zp, compute_scale_zp_blocked, get_qmin_qmax_for_qType

from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from pipeline.config import KEYS
from pipeline.config.quantsim import Precision, parse_precision
from pipeline.errors import UsageError
from pipeline.quantsim.encodings import (
    Encoding,
    encode,
    encode_range,
    encode_weight,
    quantize,
    round_trip,
)
from pipeline.quantsim.placement import place
from pipeline.quantsim.qdq import insert_qdq
from pipeline.quantsim.range_notes import describe_limited_biases
from tests.pipeline.quantsim.pictures_of_qdq import model_of, rule

NARROW_FLOATS = ("fp8", "fp4/block16", "fp16", "float8e4m3fnuz", "float4e2m1", "nvfp4/block32", "e5m2", "bfloat16")

TYPES = {"uint8": TensorProto.UINT8, "int8": TensorProto.INT8, "uint16": TensorProto.UINT16, "int16": TensorProto.INT16}
"""Not int4: onnxruntime divides a symmetric range by 15 there, and cuts the greatest number off; AIMET by 14, as we."""

numbers = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)


def precision_of(text: str) -> Precision:
    precision = parse_precision(text)
    assert precision is not None
    return precision


@given(st.sampled_from(sorted(TYPES)), numbers, numbers)
def test_scale_and_zero_point_are_those_of_onnxruntime(name: str, one: float, other: float) -> None:
    precision = precision_of(name)
    low, high = np.float32(min(one, other)), np.float32(max(one, other))
    lowest, highest = get_qmin_qmax_for_qType(TYPES[name], symmetric=precision.symmetric)
    zero, scale = compute_scale_zp(np.asarray(low), np.asarray(high), lowest, highest, precision.symmetric)
    found = encode_range((float(low), float(high)), precision)
    assert found.scale == np.float32(scale)
    assert found.zero_point == int(zero)


@given(hnp.arrays(np.float32, (7, 3), elements=numbers), st.sampled_from([0, 1]), st.sampled_from([2, 4]))
def test_scales_of_blocks_are_those_of_onnxruntime(weight: np.ndarray, axis: int, block: int) -> None:
    zero, scale = compute_scale_zp_blocked(weight, TensorProto.INT8, axis, block, symmetric=True)
    found = encode_weight(weight, precision_of(f"int8/block{block}"), axis)
    assert found.scale.shape == scale.shape
    # onnxruntime's scale of a block of zeros is its least positive number, ours is 1: the numbers are zeros either way.
    is_zero = scale < np.finfo(np.float32).tiny
    np.testing.assert_array_equal(np.where(is_zero, 1, scale), np.where(is_zero, 1, found.scale))
    np.testing.assert_array_equal(zero, found.zero_point)


@given(
    hnp.arrays(np.float32, (6, 4), elements=numbers),
    st.sampled_from(["int8", "int8/channel", "int4/block3", "uint16", "int6/channel", "uint3"]),
)
def test_a_number_moves_by_half_a_step_at_most(weight: np.ndarray, text: str) -> None:
    encoding = encode_weight(weight, precision_of(text), 0)
    stored = quantize(weight, encoding)
    assert stored.min() >= encoding.precision.lowest
    assert stored.max() <= encoding.precision.highest
    scale, zero = (encoding.spread(weight, values) for values in (encoding.scale, encoding.zero_point))
    back = (stored - zero) * scale.astype(np.float64)
    # The zero point is rounded, too, so the ends of an asymmetric range may lie half a step outside of the numbers.
    steps = 0.5 if encoding.precision.symmetric else 1.0
    assert (np.abs(back - weight) <= steps * scale * (1 + 1e-5)).all()


def test_channels_have_scales_of_their_own() -> None:
    weight = np.array([[1.0, 2.0], [-127.0, 3.0]], np.float32)
    encoding = encode_weight(weight, precision_of("int8/channel"), axis=1)
    np.testing.assert_array_equal(encoding.scale, np.array([1.0, 3 / 127], np.float32))
    np.testing.assert_array_equal(quantize(weight, encoding), [[1, 85], [-127, 127]])


@pytest.mark.parametrize(
    ("text", "lowest", "highest", "stored"),
    [("int8", -127, 127, "INT8"), ("uint8", 0, 255, "UINT8"), ("int8/asymmetric", -128, 127, "INT8"),
     ("int6", -31, 31, "INT8"), ("uint3", 0, 7, "UINT4"), ("int12", -2047, 2047, "INT16")],
)  # fmt: skip
def test_formats(text: str, lowest: int, highest: int, stored: str) -> None:
    precision = precision_of(text)
    assert (precision.lowest, precision.highest, precision.onnx_name) == (lowest, highest, stored)
    assert parse_precision(str(precision)) == precision


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (text, f"found the format '{text}': of floats with few bits fp8e4m3, .*, nvfp4 are simulated")
            for text in NARROW_FLOATS
        ),
        ("int32", "found the format 'int32', expected int2 to int16"),
        ("lpbq", "or a name that says all: lpbq32 .*, mxfp4"),
        ("fp8e4m3/asymmetric", "floats have no zero point, so they are symmetric"),
        ("int8/row", "found 'row' in the format 'int8/row', expected tensor, channel, block32"),
        ("int8/block1", "found 'block1'"),
    ],
)
def test_a_format_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_precision(text)


@pytest.mark.parametrize("text", ["fp8e4m3", "fp8e5m2/channel"])
def test_floats_of_8_bits_reach_as_far_as_the_weight_and_keep_their_digits(text: str) -> None:
    weight = np.array([[1.0, -2.0, 0.001], [30.0, 7.3, -0.02]], np.float32)
    precision = precision_of(text)
    assert str(precision) == text
    encoding = encode_weight(weight, precision, 0)
    assert not encoding.zero_point.any()
    numbers = quantize(weight, encoding)
    assert np.abs(numbers).max() == precision.highest
    digits = 2**-4 if "e4m3" in text else 2**-3  # half a unit in the last place
    values = numbers * encoding.spread(weight, encoding.scale)
    np.testing.assert_allclose(values, weight, rtol=digits * 1.001, atol=float(encoding.scale.max()) * 2**-10)


def test_a_range_of_zeros_has_a_scale() -> None:
    encoding = encode_range((0.0, 0.0), precision_of("uint8"))
    assert encoding == Encoding(encoding.precision, np.float32(1.0), np.int64(0))


@pytest.mark.parametrize(
    "text",
    ["uint8", "int8", "uint16/symmetric", "int16/asymmetric", "uint4", "int4", "uint5", "int11", "fp8e4m3", "fp8e5m2"],
)
def test_a_round_trip_is_that_of_onnxruntime(text: str) -> None:
    model = model_of("g (float[4, 50] x) => (float[4, 50] y) { y = Identity(x) }")
    x = np.random.default_rng(3).standard_normal((4, 50)).astype(np.float32) * 2
    encoding = encode_range((-1.25, 2.5), precision_of(text))  # some numbers lie outside
    found = Session.of(insert_qdq(model, {"x": encoding})).run({"x": x})["y"]
    np.testing.assert_array_equal(round_trip(x, encoding, is_stored=False), found)


@pytest.mark.parametrize(
    "text", ["int8", "int8/channel", "uint4/channel", "int4/block3", "int3/block2", "fp8e4m3/channel"]
)
def test_a_round_trip_of_a_weight_is_that_of_onnxruntime(text: str) -> None:
    weight = np.random.default_rng(4).standard_normal((7, 6)).astype(np.float32)
    model = model_of(
        "g (float[2, 7] x) => (float[7, 6] y, float[2, 6] z) { y = Identity(w) z = MatMul(x, w) }", w=weight
    )
    encoding = encode_weight(weight, precision_of(text), 0 if "block" in text else 1)
    found = Session.of(insert_qdq(model, {"w": encoding})).run({"x": np.ones((2, 7), np.float32)})["y"]
    np.testing.assert_array_equal(round_trip(weight, encoding, is_stored=True), found)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("text", ["int8", "uint8/channel", "int4/block2", "fp8e4m3"])
def test_a_weight_without_end_is_refused_by_its_name(text: str, number: float) -> None:
    """Its scale would be infinite, and all its numbers zero or NaN."""
    weight = np.ones((4, 3), np.float32)
    weight[2, 1] = number
    model = model_of("g (float[2, 4] x) => (float[2, 3] y) { y = MatMul(x, w) }", w=weight)
    with pytest.raises(
        UsageError, match=r"the stored tensor 'w' holds infinity or NaN, .* tensor:w: \{weights: float\}"
    ):
        encode(place(model, [rule("op:MatMul", text)]), {}, model)


def test_a_bias_without_end_is_refused_by_its_name() -> None:
    bias = np.array([1, np.nan, 2], np.float32)
    model = model_of("g (float[2, 4] x) => (float[2, 3] y) { y = Gemm(x, w, b) }", w=np.eye(4, 3, dtype="f4"), b=bias)
    placement = place(model, [rule("op:*", "int8", "uint8")])
    with pytest.raises(
        UsageError, match=r"the stored tensor 'b' holds infinity or NaN, .* tensor:b: \{activations: float\}"
    ):
        encode(placement, dict.fromkeys(("x", "y"), (0.0, 1.0)), model)


DEAD = np.full((4, 3), 0.5, np.float32) * np.array([1, 1e-12, 1], np.float32)
"""A weight with a channel that is nearly zero, as it is after a BatchNormalization that switches a channel off."""


def dead_channel(second: float = 2.0) -> DetachedModel:
    """Two products of one weight, with a bias each."""
    text = "g (float[2, 4] x) => (float[2, 3] y, float[2, 3] z) { y = Gemm(x, w, b) z = Gemm(x, w, c) }"
    return model_of(text, w=DEAD, b=np.full(3, 2, "f4"), c=np.full((1, 3), second, "f4"))


@pytest.mark.parametrize("text", ["int8", "int8/channel", "int16/channel", "int4/channel"])
def test_a_dead_channel_has_a_scale_in_whose_products_each_bias_fits(text: str) -> None:
    model = dead_channel(7.0)
    ranges = dict.fromkeys("xyz", (-1.0, 1.0))
    encodings = encode(place(model, [rule("op:*", text, "uint8")]), ranges, model)
    assert not list(describe_limited_biases(encodings, model, KEYS))
    np.testing.assert_allclose(round_trip(np.full(3, 2, "f4"), encodings["b"], is_stored=True), 2, rtol=1e-3)
    np.testing.assert_allclose(round_trip(np.full((1, 3), 7, "f4"), encodings["c"], is_stored=True), 7, rtol=1e-3)
    if "channel" in text:
        narrow = encode_weight(DEAD, precision_of(text), 1).scale
        np.testing.assert_array_equal(encodings["w"].scale[[0, 2]], narrow[[0, 2]], "only the dead one is widened")


def test_a_bias_beyond_32_bits_of_its_products_is_named_with_its_count() -> None:
    """The scale of a weight with zero points is never widened, as in onnxruntime."""
    model = dead_channel()
    ranges = dict.fromkeys("xyz", (-1.0, 1.0))
    encodings = encode(place(model, [rule("op:*", "uint8/channel", "uint8")]), ranges, model)
    note, _ = describe_limited_biases(encodings, model, KEYS)
    assert note.startswith("1 of the 3 numbers of the bias b are beyond 32 bits")
    assert "tensor:b: {activations: float}" in note
    stored = np.full(3, 2, "f4")
    rounded = round_trip(stored, encodings["b"], is_stored=True)
    np.testing.assert_allclose(rounded[[0, 2]], 2, rtol=1e-3)
    assert rounded[1] < 1e-3, "which is what the note is for"
