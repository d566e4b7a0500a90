"""Kernels that move elements."""

from __future__ import annotations

from functools import partial

import torch

from pipeline.ops import Kind
from pipeline.runtime.kernels.base import Attrs, Ins, Kernel, Launch, Outs, each_time


def reshape(ins: Ins, outs: Outs, _: Attrs) -> Launch:
    """Runs only where the output is no view, as for a graph output, or where the input's strides do not allow one."""
    return partial(outs[0].view(ins[0].shape).copy_, ins[0])


def transpose(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    return partial(outs[0].copy_, ins[0].permute(attrs["perm"]))


def concat(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    return partial(torch.cat, list(ins), attrs["axis"], out=outs[0])


def split(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    for piece, out in zip(torch.split(ins[0], list(attrs["sizes"]), attrs["axis"]), outs, strict=True):
        out.copy_(piece)


def slice_(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    """Bounds clamp as Python's do. Torch has no negative steps: the same elements are sliced forwards, then flipped."""
    x, flipped = ins[0], []
    for start, end, axis, step in zip(attrs["starts"], attrs["ends"], attrs["axes"], attrs["steps"], strict=True):
        taken = range(*slice(start, end, step).indices(x.shape[axis]))
        if step < 0:
            taken = taken[::-1]
            flipped.append(axis)
        x = x.movedim(axis, 0)[taken.start : max(taken.stop, taken.start) : abs(step)].movedim(0, axis)
    return partial(_flip_into, outs[0], x, flipped) if flipped else partial(outs[0].copy_, x)


def _flip_into(out: torch.Tensor, x: torch.Tensor, axes: list[int]) -> None:
    out.copy_(x.flip(axes))


def expand(ins: Ins, outs: Outs, _: Attrs) -> Launch:
    """ONNX's Expand broadcasts both ways, so the output's shape is the one to follow."""
    return partial(outs[0].copy_, ins[0].expand(outs[0].shape))


def tile(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    """Every axis split in (repeat, size): the copy then broadcasts over the repeats, without scratch."""
    sizes = ins[0].shape
    spread = [part for repeat, size in zip(attrs["repeats"], sizes, strict=True) for part in (repeat, size)]
    once = [part for size in sizes for part in (1, size)]
    return partial(outs[0].view(spread).copy_, ins[0].view(once))  # axes of size 1 fit between any strides


def pad(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    """A negative pad crops, in every mode."""
    x, out = ins[0], outs[0]
    begins, ends = attrs["pads"][: x.dim()], attrs["pads"][x.dim() :]
    if attrs["mode"] == "constant":
        _pad_constant(x, out, begins, attrs["value"])
        return
    for axis, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        size = x.shape[axis]
        positions = torch.arange(-begin, size + end)
        if attrs["mode"] == "edge":
            positions = positions.clamp(0, size - 1)
        else:
            period = max(2 * (size - 1), 1)
            positions = positions.remainder(period)
            positions = torch.minimum(positions, period - positions) if size > 1 else positions
        if begin or end:
            x = x.index_select(axis, positions)
    out.copy_(x)


def _pad_constant(x: torch.Tensor, out: torch.Tensor, begins: tuple[int, ...], value: float) -> None:
    out.fill_(value)
    inner = out
    for axis, begin in enumerate(begins):
        first = max(-begin, 0)  # of the elements of x that stay
        count = min(x.shape[axis] - first, inner.shape[axis] - max(begin, 0))
        x, inner = x.narrow(axis, first, max(count, 0)), inner.narrow(axis, max(begin, 0), max(count, 0))
    inner.copy_(x)


def select(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    return partial(outs[0].copy_, ins[0].select(attrs["axis"], attrs["index"]))


def unbind(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    for piece, out in zip(ins[0].unbind(attrs["axis"]), outs, strict=True):
        out.copy_(piece)


def diagonal(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    return partial(outs[0].copy_, ins[0].diagonal(attrs["distance"], attrs["first"], attrs["second"]))


def unfold(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    return partial(outs[0].copy_, ins[0].unfold(attrs["axis"], attrs["size"], attrs["step"]))


def contiguous(ins: Ins, outs: Outs, _: Attrs) -> Launch:
    return partial(outs[0].copy_, ins[0])


KERNELS: dict[Kind, Kernel] = {
    Kind.Reshape: reshape,
    Kind.Transpose: transpose,
    Kind.Concat: concat,
    Kind.Split: each_time(split),
    Kind.Slice: slice_,
    Kind.Expand: expand,
    Kind.Tile: tile,
    Kind.Select: select,
    Kind.Unbind: each_time(unbind),
    Kind.Diagonal: diagonal,
    Kind.Unfold: unfold,
    Kind.Contiguous: contiguous,
    Kind.Pad: each_time(pad),
}
