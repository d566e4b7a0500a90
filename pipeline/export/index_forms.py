"""ONNX forms of torch's operators that take elements, or put them, by indices or by a mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from onnxscript.function_libs.torch_lib.ops.core import aten_scatter_reduce

from pipeline.export.onnx_nodes import op


def translate_nonzero(self: Any) -> Any:
    """`aten.nonzero`: a scalar has no index, so that as many empty ones as it is true come of it."""
    if self.shape:
        return op.Transpose(op.NonZero(self), perm=[1, 0])
    return op.Slice(op.Transpose(op.NonZero(op.Reshape(self, [1])), perm=[1, 0]), [0], [0], [1])


def translate_masked_select(self: Any, mask: Any) -> Any:
    """`aten.masked_select`: the elements in their order, after both were broadcast to one shape."""
    values = op.Expand(self, op.Shape(mask))
    return op.Compress(op.Reshape(values, [-1]), op.Reshape(op.Expand(mask, op.Shape(values)), [-1]), axis=0)


def translate_index_copy(self: Any, dim: int, index: Any, source: Any) -> Any:
    """`aten.index_copy`: rows along `dim` are replaced where they lie. torch's own form moves `dim` to the front and
    back, which copies a whole cache twice for each token."""
    return op.ScatterElements(self, _as_elements(self, dim, index, source), source, axis=dim)


def translate_index_reduce(
    self: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    """`aten.index_reduce`: as `scatter_reduce`, with an index for each row along `dim`."""
    return translate_scatter_reduce(self, dim, _as_elements(self, dim, index, source), source, reduce, include_self)


def _as_elements(data: Any, dim: int, index: Any, source: Any) -> Any:
    """An index for each element of `source`, of an index for each of its rows along `dim`."""
    rank = len(data.shape)
    column = op.Reshape(index, [-1, *[1] * (rank - 1 - dim % rank)])
    return op.Expand(column, op.Shape(source))


def translate_scatter_reduce(self: Any, dim: int, index: Any, src: Any, reduce: str, include_self: bool = True) -> Any:
    """`aten.scatter_reduce`: a mean is a sum over a count; torch's own form puts the last element in its place."""
    if reduce != "mean":
        return aten_scatter_reduce(self, dim, index, src, reduce, include_self)
    if not self.shape or not src.dtype.is_floating_point():
        raise NotImplementedError("a mean of integers, or of a scalar, by scatter_reduce has no form in ONNX")
    total = aten_scatter_reduce(self, dim, index, src, "sum", include_self)
    zero, one = (op.CastLike(op.Constant(value_float=number), src) for number in (0.0, 1.0))
    start = op.Expand(one if include_self else zero, op.Shape(self))
    count = op.ScatterElements(start, index, op.Expand(one, op.Shape(src)), axis=dim, reduction="add")
    return op.Div(total, op.Max(count, one))


def translate_put(self: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    """`aten.put`: elements by their places in the flat tensor."""
    parts = [op.Reshape(part, [-1]) for part in (self, index, source)]
    return op.Reshape(op.ScatterElements(*parts, axis=0, reduction="add" if accumulate else "none"), op.Shape(self))


INDEXED: Final[Mapping[str, Callable[..., Any]]] = {
    "aten.nonzero.default": translate_nonzero,
    "aten.masked_select.default": translate_masked_select,
    "aten.index_copy.default": translate_index_copy,
    "aten.index_reduce.default": translate_index_reduce,
    "aten.scatter_reduce.two": translate_scatter_reduce,
    "aten.put.default": translate_put,
}
