"""Scales and zero points: of a weight from its numbers, of an activation from its calibrated range.

The formulas are those of min-max calibration as in onnxruntime (`compute_scale_zp`): the range holds zero, and
scale = (high - low) / (highest - lowest), computed in double precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import ml_dtypes
import numpy as np
from onnx import TensorProto, helper

from passes.encodings.encoding import BIAS, LPBQ_SCALES, Encoding, Precision, encode_bias
from passes.graph.op_facts import CONVOLUTIONS
from passes.weights.detached import DetachedModel
from pipeline.config import OptionNames
from pipeline.errors import UsageError
from pipeline.quantsim.placement import PlacedSite, Placement

Range = tuple[float, float]

BEYOND_ANY_FORMAT: Final = np.float32(2**40)
"""Larger than any number of a format with its zero point, and within int64."""


def encode(
    placement: Placement,
    ranges: Mapping[str, Range],
    model: DetachedModel,
    chosen: Mapping[str, Encoding] = MappingProxyType({}),
) -> dict[str, Encoding]:
    """The encoding of each quantized tensor.

    Where 32 bits do not hold a bias, the scale of the channel's weights grows until they do, for all targets: the
    weights of such a channel are nearly zero next to its bias, so the steps that they lose are no loss.

    Args:
        ranges: by the name of a group.
        chosen: encodings of weights in place of those by min-max.

    Raises:
        UsageError: a weight or a bias holds infinity or NaN, which no scale can express.
    """
    stored = model.index.initializers
    encodings: dict[str, Encoding] = {}
    biases, weights = list[PlacedSite](), set[str]()
    fixed = _fixed_groups(placement)
    for placed in placement.quantized_sites():
        site, precision = placed.site, placed.precision
        assert precision is not None
        if site.role == "bias":
            biases.append(placed)
        elif site.tensor in chosen:
            encodings[site.tensor] = chosen[site.tensor]
        elif site.role == "weight":
            axis = site.summed_axis if precision.granularity == "block" else site.channel_axis
            array = model.array(stored[site.tensor])
            _check_numbers(site.tensor, array, "weights", placement.names)
            kernel = range(2, array.ndim) if site.op in CONVOLUTIONS else ()
            encodings[site.tensor] = encode_weight(array, precision, axis, kernel)
            weights.add(site.tensor)
        else:
            encodings[site.tensor] = encode_range(fixed.get(site.group) or ranges[site.group], precision)
    for placed in biases:
        assert placed.site.bias_of is not None
        data, weight = placed.site.bias_of
        bias = model.array(stored[placed.site.tensor])
        _check_numbers(placed.site.tensor, bias, "activations", placement.names)
        if weight in weights:  # and not a chosen one, whose elements fit its scale
            encodings[weight] = widen_for_bias(encodings[weight], encodings[data], bias)
    for placed in biases:  # after all have widened a weight that they share
        data, weight = (encodings[name] for name in placed.site.bias_of or ())
        encodings[placed.site.tensor] = encode_bias(data, weight, placed.site.bias_rank)
    return encodings


def check_stored(model: DetachedModel, placement: Placement) -> None:
    """Refuse a weight or a bias that holds infinity or NaN by its own name: what it makes is infinite or NaN too.

    Raises:
        UsageError: as of `encode`.
    """
    for placed in placement.quantized_sites():
        if placed.site.role in ("weight", "bias"):
            array = model.array(model.index.initializers[placed.site.tensor])
            kind = "weights" if placed.site.role == "weight" else "activations"
            _check_numbers(placed.site.tensor, array, kind, placement.names)


def _check_numbers(tensor: str, array: np.ndarray, kind: str, names: OptionNames) -> None:
    if not np.isfinite([array.min(), array.max()]).all():
        raise UsageError(
            f"the stored tensor {tensor!r} holds infinity or NaN, which no scale can express; mend the model, or leave "
            f"the tensor in float: {names.in_float.format(f'tensor:{tensor}', kind)}"
        )


def widen_for_bias(weight: Encoding, data: Encoding, bias: np.ndarray) -> Encoding:
    """The encoding of `weight` with scales in whose products with that of `data` 32 bits hold `bias`, as
    onnxruntime's quantizer widens them (`_adjust_weight_scale_for_int32_bias` of onnxruntime 1.31): by channel, with
    room for the rounding of the scale. One that is not symmetric stays as it is, as there."""
    precision, scale = weight.precision, weight.scale.astype(np.float64)
    if precision.float_type or not precision.symmetric or precision.granularity == "block":
        return weight
    largest = np.abs(bias.astype(np.float64).reshape(-1))
    least = BIAS_ROOM * (largest if scale.ndim else largest.max(initial=0)) / BIAS.highest
    found = data.scale.astype(np.float64) * scale
    is_small = (found > 0) & (found < least)
    wider = np.where(is_small, scale * (least / np.where(is_small, found, 1)), scale)
    return replace(weight, scale=wider.astype(weight.scale.dtype)) if is_small.any() else weight


BIAS_ROOM: Final = 1.0001
"""How many times the least scale in which 32 bits hold a bias one is that a weight is widened for."""


def find_limited_biases(encodings: Mapping[str, Encoding], model: DetachedModel) -> Iterator[tuple[str, int, int]]:
    """The biases with elements that are too large for 32 bits in the scale of the products that they are added to, how
    many such elements each has, and how many in all. They become the largest integer, which is another bias."""
    for tensor in model.proto.graph.initializer:
        encoding = encodings.get(tensor.name)
        if encoding is None or encoding.precision != BIAS:
            continue
        array = model.array(tensor)
        largest = encoding.spread(array, encoding.scale.astype(np.float64)) * BIAS.highest
        beyond = int((np.abs(array) > largest).sum())
        if beyond:
            yield tensor.name, beyond, array.size


def encode_range(limits: Range, precision: Precision) -> Encoding:
    """One scale for all values between `limits`."""
    low, high = (np.float32(limit) for limit in limits)
    return Encoding(precision, *_scale_of(np.asarray(low), np.asarray(high), precision))


def encode_weight(array: np.ndarray, precision: Precision, axis: int | None, kernel: Sequence[int] = ()) -> Encoding:
    """The scales of a weight, for the whole, for each index of `axis`, or for each block of it.

    Args:
        kernel: the axes of the positions of a kernel, which share the scale of a block, as in AIMET.
    """
    if precision.granularity == "tensor" or axis is None:
        return Encoding(precision.per_tensor(), *_scale_of(array.min(), array.max(), precision))
    if precision.granularity == "channel":
        others = tuple(place for place in range(array.ndim) if place != axis)
        return Encoding(precision, *_scale_of(array.min(others), array.max(others), precision), axis)
    starts = range(0, array.shape[axis], precision.block)
    lows, highs = (np.asarray(edge.reduceat(array, starts, axis=axis)) for edge in (np.minimum, np.maximum))
    low = np.broadcast_to(lows.min(tuple(kernel), keepdims=True), lows.shape)
    high = np.broadcast_to(highs.max(tuple(kernel), keepdims=True), highs.shape)
    if precision.scale_type == "UINT8":
        return _encode_lpbq(low, high, precision, axis, kernel)
    if precision.scale_type:
        return _encode_block_floats(np.maximum(-low, high).astype(np.float32), precision, axis)
    return Encoding(precision, *_scale_of(low, high, precision), axis)


def fit_scale(array: np.ndarray, encoding: Encoding) -> Encoding:
    """The encoding with the scales, of 0.6 to 1 times those given, whose rounding has the least squared error.

    Args:
        array: a weight.
        encoding: of integers, whose scales hold the whole range.
    """
    best, least = encoding.scale, np.full(encoding.scale.shape, np.inf)
    for part in SCALE_PARTS:
        scale = (encoding.scale * part).astype(encoding.scale.dtype)
        rounded = round_trip(array, replace(encoding, scale=scale), is_stored=True)
        error = _sum_by_scale(np.square(rounded - array, dtype=np.float64), encoding)
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    return replace(encoding, scale=best)


SCALE_PARTS: Final = np.linspace(1, 0.6, 41)


def _sum_by_scale(array: np.ndarray, encoding: Encoding) -> np.ndarray:
    axis = encoding.axis
    if axis is None:
        return array.sum()
    if encoding.precision.granularity == "block":
        return np.add.reduceat(array, range(0, array.shape[axis], encoding.precision.block), axis=axis)
    return array.sum(tuple(place for place in range(array.ndim) if place != axis))


def _encode_lpbq(low: np.ndarray, high: np.ndarray, precision: Precision, axis: int, kernel: Sequence[int]) -> Encoding:
    """The scales of blocks as integers from 1 to 16 of the scale of their channel, as AIMET 2.42 rounds them.

    aimet-onnx computes in double precision, and takes the smallest scale whose range from -8 to 7 holds the block.

    Args:
        low: the least element of each block.
        high: the greatest element of each block.
    """
    low, high = low.astype(np.float64), high.astype(np.float64)
    scale = np.maximum(low / precision.lowest, high / precision.highest)
    outer = scale.max((axis, *kernel), keepdims=True) / LPBQ_SCALES
    outer = np.where(outer < np.finfo(np.float32).tiny, 1.0, outer)
    if sum(size > 1 for size in outer.shape) > 1:
        raise UsageError(
            f"found {precision} for a weight whose channels lie along several axes, expected a matrix or a "
            f"convolution; take int4/block{precision.block}"
        )
    inner = np.clip(np.rint(scale / outer), 1, LPBQ_SCALES).astype(np.float32)
    outer = outer.astype(np.float32)
    return Encoding(precision, inner * outer, np.zeros(scale.shape, np.int64), axis, outer)


def _encode_block_floats(largest: np.ndarray, precision: Precision, axis: int) -> Encoding:
    """Scales of few bits, by the largest absolute value of each block.

    A power of 2 is the one whose product with the greatest power of 2 of the format is that of the value, as in OCP's
    Microscaling Formats 1.0, section 6.3: values above the greatest number of the format become that. NVFP4's scales
    are those of the whole range, rounded to floats of 8 bits, of which the greatest stands for the largest value.
    """
    zero = np.zeros(largest.shape, np.int64)
    dtype = helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(str(precision.scale_type)))
    if precision.scale_type == "FLOAT8E8M0":
        exponents = np.frexp(largest)[1] - 1 - int(np.log2(precision.highest))
        powers = np.where(largest == 0, 0, np.clip(exponents, *E8M0_EXPONENTS))
        return Encoding(precision, np.exp2(powers.astype(np.float32)), zero, axis)
    greatest = np.float32(ml_dtypes.finfo(dtype).max)
    outer = largest.max(initial=0) / (np.float32(precision.highest) * greatest) or np.float32(1)
    inner = np.clip(largest / np.float32(precision.highest) / outer, ml_dtypes.finfo(dtype).smallest_normal, greatest)
    return Encoding(precision, inner.astype(dtype).astype(np.float32) * outer, zero, axis, np.asarray(outer))


E8M0_EXPONENTS: Final = (-127, 127)


def quantize(array: np.ndarray, encoding: Encoding) -> np.ndarray:
    """The numbers of `array` in the format of `encoding`, as int64; ties go to the even number, as ONNX has it. Floats
    of few bits come as float32."""
    scale, zero = (encoding.spread(array, values) for values in (encoding.scale, encoding.zero_point))
    if encoding.precision.float_type:
        limited = np.clip(array.astype(np.float32) / scale, encoding.precision.lowest, encoding.precision.highest)
        dtype = helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(encoding.precision.float_type))
        return limited.astype(dtype).astype(np.float32)
    lowest, highest = encoding.precision.lowest, encoding.precision.highest
    with np.errstate(over="ignore"):  # a bias in the scale of its products may be beyond float32, and is limited
        numbers = np.rint(array.astype(np.float32) / scale)
    limited = np.clip(numbers, -BEYOND_ANY_FORMAT, BEYOND_ANY_FORMAT).astype(np.int64)
    return np.clip(limited + zero, lowest, highest)


def dequantize_integers(integers: np.ndarray, encoding: Encoding) -> np.ndarray:
    """The float32 values for which integers of a format stand, which `quantize` turns into these integers."""
    whole = (integers - encoding.spread(integers, encoding.zero_point)).astype(np.float32)
    return whole * encoding.spread(whole, encoding.scale)


def round_trip(array: np.ndarray, encoding: Encoding, *, is_stored: bool) -> np.ndarray:
    """`array` quantized and dequantized, as float32.

    Args:
        is_stored: by `quantize`, as a constant is. QuantizeLinear knows dtypes alone: beyond the range of a symmetric
            format an activation gets the lowest number too, which is unused otherwise.
    """
    scale, zero = (encoding.spread(array, values) for values in (encoding.scale, encoding.zero_point))
    if encoding.precision.float_type:
        return quantize(array, encoding).astype(np.float32) * scale
    numbers = np.asarray(array.astype(np.float32, copy=False) / scale)
    np.rint(numbers, out=numbers)
    precision = encoding.precision
    has_unused = precision.signed and precision.symmetric and precision.fills_its_type
    lowest = precision.lowest - (has_unused and not is_stored)
    np.clip(numbers, np.float32(lowest - zero), np.float32(precision.highest - zero), out=numbers)
    with np.errstate(over="ignore"):  # the lowest float, as masks have it, is a number beyond it after rounding
        numbers *= scale
    return numbers


def _scale_of(low: np.ndarray, high: np.ndarray, precision: Precision) -> tuple[np.ndarray, np.ndarray]:
    low, high = (np.asarray(edge, np.float64) for edge in (np.minimum(low, 0), np.maximum(high, 0)))
    if precision.symmetric:
        high = np.maximum(np.abs(low), np.abs(high))
        low = -high
    scale = (high - low) / (precision.highest - precision.lowest)
    is_zero = scale < np.finfo(np.float32).tiny
    scale = np.where(is_zero, 1.0, scale)
    middle = np.rint((precision.lowest + precision.highest) / 2.0)
    zero = np.full_like(scale, middle) if precision.symmetric else np.rint(precision.lowest - low / scale)
    zero = np.where(is_zero & (not precision.symmetric), 0, zero)
    return scale.astype(np.float32), zero.astype(np.int64)


def _fixed_groups(placement: Placement) -> dict[str, Range]:
    """The range of each group whose values are all computed by a Softmax or its like, or as a rule limits them."""
    limits: dict[str, set[Range | None]] = {}
    for placed in placement.sites:
        if not placed.site.moves:
            limits.setdefault(placed.site.group, set()).add(placed.limits)
    return {group: known for group, ranges in limits.items() if len(ranges) == 1 and (known := ranges.pop())}
