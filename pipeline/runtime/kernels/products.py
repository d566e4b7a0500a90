"""Kernels made of calls of torch over views: products of matrices as one call of BLAS, and max pooling.

Max pooling is the maximum of shifted views, one call for each element of the window, without allocation. Torch's own
kernels also find the place of each maximum, allocate, and are five times slower for images with channels first
(benchmarks/RESULTS.md). Both pass on NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from pipeline.runtime.kernels.base import Launch, OverloadCall, in_turn


def multiply_matrices(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> Launch:
    """One product of matrices, with a bias for each column."""
    return partial(torch.mm, a, b, out=out) if bias is None else partial(torch.addmm, bias, a, b, out=out)


def multiply_batches(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, batch: torch.Size) -> Launch | None:
    """As a single mm or bmm over views, which torch.matmul derives at each call; None where strides need a copy."""
    (rows, inner), columns = a.shape[-2:], b.shape[-1]
    count = math.prod(batch)
    try:
        if b.dim() == 2:
            return multiply_matrices(a.view(count * rows, inner), b, None, out.view(count * rows, columns))
        many_a = a.expand(*batch, rows, inner).view(count, rows, inner)
        many_b = b.expand(*batch, inner, columns).view(count, inner, columns)
        return partial(torch.bmm, many_a, many_b, out=out.view(count, rows, columns))
    except RuntimeError:
        return None


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> Launch:
    """`x @ weight + bias` with a matrix on the right and a bias for each column, as one product where strides allow."""
    try:
        rows, result = x.view(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    except RuntimeError:
        return partial(_multiply_rows, x, weight, bias, out)
    return multiply_matrices(rows, weight, bias, result)


def multiply_and_activate(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor, activation: str
) -> Launch | None:
    """Product, bias and activation as one call of cuBLASLt; None for an activation that its epilogue does not have, or
    where strides need a copy. On CUDA the GELU of `_addmm_activation` is that by tanh."""
    if activation not in ("relu", "gelu_tanh") or not (x.is_contiguous() and out.is_contiguous()):
        return None
    rows, result = x.view(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    epilogue = torch.ops.aten._addmm_activation.out
    return OverloadCall.bind(epilogue, bias, rows, weight, use_gelu=activation == "gelu_tanh", out=result)


def _multiply_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    torch.matmul(x, weight, out=out)
    if bias is not None:
        out.add_(bias)


def flatten_rows(tensor: torch.Tensor, kept: int) -> torch.Tensor | None:
    """All axes but the last `kept` as one; None where that takes a copy."""
    if tensor.dim() <= kept or not tensor.numel():
        return None
    try:
        return tensor.view(-1, *tensor.shape[tensor.dim() - kept :])
    except RuntimeError:
        return None


MOST_ELEMENTS = 32
"""Elements of a window up to which one call for each of them was measured to be faster than torch's kernel."""


@dataclass(frozen=True, slots=True)
class PoolWindow:
    """A window by spatial axis; `begins` are the pads before the first element."""

    sizes: Sequence[int]
    strides: Sequence[int]
    begins: Sequence[int]
    dilations: Sequence[int]


Span = tuple[int, int, int]
"""First and last window, without the last, that one element of a window is real in; and where it is in the first."""


def launch_max_pool(x: torch.Tensor, out: torch.Tensor, window: PoolWindow) -> Launch | None:
    """Write the maximum of each window of `x` into `out`; None where torch's kernel is the better one."""
    if math.prod(window.sizes) > MOST_ELEMENTS:
        return None
    if not _is_stored_alike(x, out):
        return None  # each call would turn the axes around, where one copy of the result does
    images = x.dim() - len(window.sizes)
    taps = list(product(*(_find_spans(x, out, window, axis, images) for axis in range(len(window.sizes)))))
    pairs = [_cut_views(x, out, spans, window.strides, images) for spans in taps]
    whole = [view for view, part in pairs if part.shape == out.shape]
    parts = [(view, part) for view, part in pairs if part.shape != out.shape]
    return in_turn(*_begin(whole, out), *(partial(torch.maximum, part, view, out=part) for view, part in parts))


def _is_stored_alike(x: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the axes of both lie in the same order in memory; an axis of one element lies nowhere."""
    axes = [axis for axis in range(x.dim()) if x.shape[axis] > 1 and out.shape[axis] > 1]
    return sorted(axes, key=x.stride) == sorted(axes, key=out.stride)


def _begin(whole: Sequence[torch.Tensor], out: torch.Tensor) -> Iterator[Launch]:
    """The maximum of the views that have an element for each window."""
    if not whole:
        yield partial(out.fill_, _lowest_number(out.dtype))
    elif len(whole) == 1:
        yield partial(out.copy_, whole[0])
    else:
        yield partial(torch.maximum, whole[0], whole[1], out=out)
        yield from (partial(torch.maximum, out, view, out=out) for view in whole[2:])


def _lowest_number(dtype: torch.dtype) -> float:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _find_spans(x: torch.Tensor, out: torch.Tensor, window: PoolWindow, axis: int, images: int) -> Iterator[Span]:
    """For each element of the window along `axis`; those that are padding in every window are left out."""
    size, windows, stride = x.shape[images + axis], out.shape[images + axis], window.strides[axis]
    for at in range(window.sizes[axis]):
        start = at * window.dilations[axis] - window.begins[axis]
        first = max(0, -(start // stride))
        last = min(windows, (size - 1 - start) // stride + 1)
        if first < last:
            yield first, last, start + first * stride


def _cut_views(
    x: torch.Tensor, out: torch.Tensor, spans: Sequence[Span], strides: Sequence[int], images: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One element of each window that has it, and where the maxima of these windows are."""
    for axis, ((first, last, start), stride) in enumerate(zip(spans, strides, strict=True), images):
        x = x[(slice(None),) * axis + (slice(start, start + (last - first - 1) * stride + 1, stride),)]
        out = out.narrow(axis, first, last - first)
    return x, out
