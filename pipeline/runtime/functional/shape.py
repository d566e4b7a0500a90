"""Forms that move elements; their gradients move them back."""

from __future__ import annotations

import torch
from torch.nn import functional

from pipeline.ops import Kind
from pipeline.runtime.functional.base import Attrs, Form, Ins, Specs


def reshape(ins: Ins, _: Attrs, outs: Specs) -> torch.Tensor:
    return ins[0].reshape(outs[0].sizes)


def split(ins: Ins, attrs: Attrs, _: Specs) -> tuple[torch.Tensor, ...]:
    return ins[0].split(list(attrs["sizes"]), attrs["axis"])


def take_slices(ins: Ins, attrs: Attrs, _: Specs) -> torch.Tensor:
    """Torch has no negative steps: the elements of one are taken forwards, and turned around."""
    x = ins[0]
    for start, end, axis, step in zip(attrs["starts"], attrs["ends"], attrs["axes"], attrs["steps"], strict=True):
        places = range(x.shape[axis])[start:end:step]
        if not places:
            x = x.narrow(axis, 0, 0)
            continue
        first, last = sorted((places[0], places[-1]))
        index = [slice(None)] * x.dim()
        index[axis] = slice(first, last + 1, abs(step))
        x = x[tuple(index)]
        x = x.flip(axis) if step < 0 else x
    return x


def pad(ins: Ins, attrs: Attrs, _: Specs) -> torch.Tensor:
    """A negative pad crops, in every mode."""
    x, pads = ins[0], attrs["pads"]
    pairs = list(zip(pads[: x.dim()], pads[x.dim() :], strict=True))
    if attrs["mode"] == "constant":
        return functional.pad(x, [pad for pair in reversed(pairs) for pad in pair], value=attrs["value"])
    for axis, (begin, end) in enumerate(pairs):
        size = x.shape[axis]
        places = torch.arange(-begin, size + end)
        if attrs["mode"] == "edge":
            places = places.clamp(0, size - 1)
        elif size > 1:  # a walk back and forth between the first and the last element
            places = (places.remainder(2 * size - 2) - (size - 1)).abs().neg() + (size - 1)
        else:
            places = places * 0
        x = x.index_select(axis, places) if begin or end else x
    return x


FORMS: dict[Kind, Form] = {
    Kind.Reshape: reshape,
    Kind.Transpose: lambda ins, attrs, _: ins[0].permute(attrs["perm"]),
    Kind.Concat: lambda ins, attrs, _: torch.cat(list(ins), attrs["axis"]),
    Kind.Split: split,
    Kind.Slice: take_slices,
    Kind.Expand: lambda ins, _, outs: ins[0].expand(outs[0].sizes),
    Kind.Tile: lambda ins, attrs, _: ins[0].repeat(attrs["repeats"]),
    Kind.Pad: pad,
    Kind.Select: lambda ins, attrs, _: ins[0].select(attrs["axis"], attrs["index"]),
    Kind.Unbind: lambda ins, attrs, _: ins[0].unbind(attrs["axis"]),
    Kind.Diagonal: lambda ins, attrs, _: ins[0].diagonal(attrs["distance"], attrs["first"], attrs["second"]),
    Kind.Unfold: lambda ins, attrs, _: ins[0].unfold(attrs["axis"], attrs["size"], attrs["step"]),
    Kind.Contiguous: lambda ins, _, __: ins[0].contiguous(),
}
