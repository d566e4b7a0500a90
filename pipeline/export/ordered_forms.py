"""Forms in ONNX of torch's operators on elements in their order: sorts, medians, modes, running products and extremes.

A running value is found in rounds, each of which combines a place with what is 1, 2, 4, … places before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from onnxscript import ir

from pipeline.export.onnx_nodes import op


def translate_kthvalue(self: Any, k: Any, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    """`aten.kthvalue`, the last of the k least elements: of equal elements the index may be another."""
    count = [k] if isinstance(k, int) else op.Reshape(k, [-1])
    pair = op.TopK(self, count, axis=dim, largest=0)
    pair = [op.Slice(part, [-1], [2**62], [dim]) for part in pair]
    values, indices = pair if keepdim else [op.Squeeze(part, [dim]) for part in pair]
    return values, indices


def translate_sort(self: Any, dim: int = -1, descending: bool = False, stable: bool | None = None) -> tuple[Any, Any]:
    """`aten.sort`: TopK has equal elements in their order, as a stable sort; onnxruntime has it for wide integers."""
    del stable
    if not self.shape:
        return op.Identity(self), op.Constant(value_int=0)
    is_wide = self.dtype.is_floating_point() or self.dtype.bitwidth >= 32
    keys = self if is_wide else op.Cast(self, to=ir.DataType.INT32.value)
    values, places = op.TopK(keys, _size_along(self, dim), axis=dim, largest=int(descending))
    return values if is_wide else op.CastLike(values, self), places


def translate_median(self: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """`aten.median.dim`: the lower one of two in the middle."""
    if isinstance(self.shape[dim], int):
        return translate_kthvalue(self, (self.shape[dim] + 1) // 2, dim, keepdim)
    return translate_kthvalue(self, op.Div(op.Add(_size_along(self, dim), [1]), [2]), dim, keepdim)


def _size_along(value: Any, dim: int) -> Any:
    axis = dim % len(value.shape)
    return op.Shape(value, start=axis, end=axis + 1)


def translate_median_of_all(self: Any) -> Any:
    """`aten.median`."""
    half = op.Div(op.Add(op.Size(self), 1), 2)
    return translate_kthvalue(op.Reshape(self, [-1]), half, 0)[0]


def translate_nanmedian(self: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """`aten.nanmedian.dim`: the lower one in the middle of the elements that are numbers; NaN where none is."""
    if not self.dtype.is_floating_point():
        return translate_median(self, dim, keepdim)
    is_nan = op.IsNaN(self)
    ordered, places = op.TopK(
        op.Where(is_nan, _filler(self, math.inf), self), _size_along(self, dim), axis=dim, largest=0
    )
    count = op.ReduceSum(op.Cast(op.Not(is_nan), to=ir.DataType.INT64.value), [dim], keepdims=1)
    middle = op.Div(op.Max(op.Sub(count, [1]), op.Constant(value_ints=[0])), [2])
    value = op.Where(op.Less(count, [1]), _filler(self, math.nan), op.GatherElements(ordered, middle, axis=dim))
    pair = [value, op.GatherElements(places, middle, axis=dim)]
    values, indices = pair if keepdim else [op.Squeeze(part, [dim]) for part in pair]
    return values, indices


def translate_nanmedian_of_all(self: Any) -> Any:
    """`aten.nanmedian`."""
    flat = op.Reshape(self, [-1])
    flat.shape, flat.dtype = ir.Shape([None]), self.dtype
    return translate_nanmedian(flat, 0)[0]


def translate_mode(self: Any, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    """`aten.mode`: the least of the most frequent elements, and its last place; each element is compared with all."""
    rank, integer = len(self.shape), ir.DataType.INT64.value
    dim %= rank
    equal = op.Equal(op.Unsqueeze(self, [dim + 1]), op.Unsqueeze(self, [dim]))
    counts = op.ReduceSum(op.Cast(equal, to=integer), [dim + 1], keepdims=0)
    is_chosen = op.Equal(counts, op.ReduceMax(counts, [dim], keepdims=1))
    value = op.ReduceMin(op.Where(is_chosen, self, _filler(self, math.inf)), [dim], keepdims=1)
    places = op.Where(op.Equal(self, value), _places_along(self, dim), [-1])
    pair = [value, op.ReduceMax(places, [dim], keepdims=1)]
    values, indices = pair if keepdim else [op.Squeeze(part, [dim]) for part in pair]
    return values, indices


def _filler(like: Any, number: float) -> Any:
    """The number, or for integers the end of their range that is next to it, as a vector of one element."""
    if like.dtype.is_floating_point():
        return op.CastLike(op.Constant(value_floats=[number]), like)
    limits = np.iinfo(like.dtype.numpy())
    return op.CastLike(op.Constant(value_ints=[int(limits.max if number > 0 else limits.min)]), like)


def _places_along(value: Any, dim: int) -> Any:
    """0, 1, 2, … along `dim`, of size 1 along the others."""
    dim %= len(value.shape)
    size = op.Squeeze(_size_along(value, dim), [0])
    places = op.Range(0, size, 1)
    return op.Reshape(places, [-1 if at == dim else 1 for at in range(len(value.shape))])


def _scan(value: Any, dim: int, combine: Callable[..., Any], neutral: Any) -> Any:
    """`value` combined with all before it along `dim`: in each step with what is 1, 2, 4, … places before."""
    size = value.shape[dim]
    if not isinstance(size, int):
        raise NotImplementedError("a running product or extreme along an open dim has no form in ONNX; fix its size")
    neutral = op.Squeeze(neutral, [0])
    for places in (2**step for step in range(max(size - 1, 0).bit_length())):
        value = combine(value, op.Pad(value, [places, -places], neutral, [dim]))
    return op.Identity(value)


def translate_cumprod(self: Any, dim: int, dtype: int | None = None) -> Any:
    """`aten.cumprod`."""
    product = self if dtype in (None, -1) else op.Cast(self, to=dtype)
    product.shape = self.shape
    return _scan(product, dim, op.Mul, op.CastLike(op.Constant(value_floats=[1.0]), product))


def _translate_running_extreme(combine: Callable[..., Any], start: float) -> Callable[..., Any]:
    """`aten.cummax` or `aten.cummin`: the extremes so far, and the last place of each."""

    def translate(self: Any, dim: int) -> tuple[Any, Any]:
        values = _scan(self, dim, combine, _filler(self, start))
        is_new = op.Equal(self, values)
        if self.dtype.is_floating_point():
            is_new = op.Or(is_new, op.IsNaN(self))
        places = op.Where(is_new, _places_along(self, dim), [0])
        places.shape = self.shape
        return values, _scan(places, dim, op.Max, [0])

    return translate


def translate_searchsorted(
    sorted_sequence: Any, self: Any, out_int32: bool = False, right: bool = False, side: Any = None, sorter: Any = None
) -> Any:
    """`aten.searchsorted`: how many elements of the sequence come before each value; each is compared with all."""
    value = (
        op.CastLike(op.Constant(value_float=float(self)), sorted_sequence) if isinstance(self, int | float) else self
    )
    ordered = sorted_sequence if sorter is None else op.GatherElements(sorted_sequence, sorter, axis=-1)
    if not isinstance(self, int | float):
        value = op.Unsqueeze(value, [-1])
        rows = len(sorted_sequence.shape) > 1
        ordered = op.Unsqueeze(ordered, [-2]) if rows else ordered
    is_after = op.Greater if right or side == "right" else op.GreaterOrEqual
    before = op.Cast(op.Not(is_after(ordered, value)), to=ir.DataType.INT64.value)  # so that NaN comes after all
    count = op.ReduceSum(before, [-1], keepdims=0)
    return op.Cast(count, to=ir.DataType.INT32.value) if out_int32 else count


ORDERED: Final[Mapping[str, Callable[..., Any]]] = {
    "aten.kthvalue.default": translate_kthvalue,
    "aten.sort.default": translate_sort,
    "aten.sort.stable": translate_sort,
    "aten.median.default": translate_median_of_all,
    "aten.median.dim": translate_median,
    "aten.cumprod.default": translate_cumprod,
    "aten.cummax.default": _translate_running_extreme(op.Max, -math.inf),
    "aten.cummin.default": _translate_running_extreme(op.Min, math.inf),
    "aten.nanmedian.default": translate_nanmedian_of_all,
    "aten.nanmedian.dim": translate_nanmedian,
    "aten.mode.default": translate_mode,
    "aten.searchsorted.Tensor": translate_searchsorted,
    "aten.searchsorted.Scalar": translate_searchsorted,
}
