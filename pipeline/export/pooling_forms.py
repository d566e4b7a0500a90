"""ONNX forms of torch's pools to a given size, whose windows differ in length where the sizes do not divide."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from pipeline.export.onnx_nodes import constant, op


def translate_adaptive_max(self: Any, output_size: Sequence[int]) -> tuple[Any, Any]:
    """`aten.adaptive_max_pool2d` and `3d`: the largest element of each window, and its place in the image.

    Along each axis the elements of a window are gathered; a shorter window repeats its last element.
    """
    sizes = _sizes(self, len(output_size))
    rank, first = len(sizes), len(self.shape) - len(sizes)
    places = [_places(size, count) for size, count in zip(sizes, output_size, strict=True)]
    windows = self
    for axis, wanted in enumerate(places):  # each axis becomes two: windows, and the elements of a window
        windows = op.Gather(windows, constant(wanted), axis=first + 2 * axis)
    axes = [*range(first), *range(first, first + 2 * rank, 2), *range(first + 1, first + 2 * rank, 2)]
    flat = np.zeros([*output_size, *(wanted.shape[1] for wanted in places)], np.int64)
    for axis, (wanted, size) in enumerate(zip(places, sizes, strict=True)):
        shape = [1] * (2 * rank)
        shape[axis], shape[rank + axis] = wanted.shape
        flat = flat * size + wanted.reshape(shape)
    joined = op.Concat(op.Shape(self, end=first), op.Constant(value_ints=[*output_size, -1]), axis=0)
    windows = op.Reshape(op.Transpose(windows, perm=axes), joined)
    chosen = op.ArgMax(windows, axis=-1, keepdims=1)
    flat = op.Expand(constant(flat.reshape(*output_size, -1)), op.Shape(windows))
    indices = op.Squeeze(op.GatherElements(flat, chosen, axis=-1), [-1])
    return op.ReduceMax(windows, [-1], keepdims=0), indices


def translate_adaptive_average(self: Any, output_size: Sequence[int]) -> Any:
    """`aten._adaptive_avg_pool3d`: along each axis a product with the matrix that averages its windows."""
    sizes = _sizes(self, len(output_size))
    first, rank = len(self.shape) - len(sizes), len(self.shape)
    for axis, (size, count) in enumerate(zip(sizes, output_size, strict=True), first):
        weights = np.zeros((size, count), np.float32)
        for at, (begin, end) in enumerate(_windows(size, count)):
            weights[begin:end, at] = 1 / (end - begin)
        swap = [*range(rank)]
        swap[axis], swap[-1] = swap[-1], swap[axis]
        product_of_axis = op.MatMul(op.Transpose(self, perm=swap), op.CastLike(constant(weights), self))
        self = op.Transpose(product_of_axis, perm=swap)
    return self


def _sizes(value: Any, rank: int) -> list[int]:
    sizes = list(value.shape)[-rank:]
    if not all(isinstance(size, int) for size in sizes):
        raise NotImplementedError(
            "a pool to a given size has a form in ONNX where the sizes of its input are numbers, and no open dims"
        )
    return sizes


def _windows(size: int, count: int) -> list[tuple[int, int]]:
    """Where each window of an axis begins and ends."""
    return [(at * size // count, -(-(at + 1) * size // count)) for at in range(count)]


def _places(size: int, count: int) -> np.ndarray:
    """The places that each window of an axis has, as rows of one length."""
    windows = _windows(size, count)
    most = max(end - begin for begin, end in windows)
    return np.array([[min(begin + step, end - 1) for step in range(most)] for begin, end in windows])


POOLS: Final[Mapping[str, Callable[..., Any]]] = {
    "aten.adaptive_max_pool2d.default": translate_adaptive_max,
    "aten.adaptive_max_pool3d.default": translate_adaptive_max,
    "aten._adaptive_avg_pool3d.default": translate_adaptive_average,
}
