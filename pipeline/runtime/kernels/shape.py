"""Kernels of views, for results that have memory of their own, and of conversions."""

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


def split(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    for piece, out in zip(torch.split(ins[0], list(attrs["sizes"]), attrs["axis"]), outs, strict=True):
        out.copy_(piece)


def slice_(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    """Bounds clamp as Python's do."""
    x = ins[0]
    for start, end, axis, step in zip(attrs["starts"], attrs["ends"], attrs["axes"], attrs["steps"], strict=True):
        x = x.movedim(axis, 0)[start:end:step].movedim(0, axis)
    return partial(outs[0].copy_, x)


def expand(ins: Ins, outs: Outs, _: Attrs) -> Launch:
    """ONNX's Expand broadcasts both ways, so the output's shape is the one to follow."""
    return partial(outs[0].copy_, ins[0].expand(outs[0].shape))


def select(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    return partial(outs[0].copy_, ins[0].select(attrs["axis"], attrs["index"]))


def unbind(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    for piece, out in zip(ins[0].unbind(attrs["axis"]), outs, strict=True):
        out.copy_(piece)


def diagonal(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    return partial(outs[0].copy_, ins[0].diagonal(attrs["distance"], attrs["first"], attrs["second"]))


def unfold(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    return partial(outs[0].copy_, ins[0].unfold(attrs["axis"], attrs["size"], attrs["step"]))


def copy(ins: Ins, outs: Outs, _: Attrs) -> Launch:
    return partial(outs[0].copy_, ins[0])


KERNELS: dict[Kind, Kernel] = {
    Kind.Identity: copy,
    Kind.Cast: copy,
    Kind.Reshape: reshape,
    Kind.Transpose: transpose,
    Kind.Split: each_time(split),
    Kind.Slice: slice_,
    Kind.Expand: expand,
    Kind.Select: select,
    Kind.Unbind: each_time(unbind),
    Kind.Diagonal: diagonal,
    Kind.Unfold: unfold,
    Kind.Contiguous: copy,
}
