"""Kinds that torch's views and copies become (`aten/views.py`), with concrete sizes. No op has the name of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from pipeline.ir.graph import TensorSpec
from pipeline.ops.kinds import Kind
from pipeline.ops.layout import Layout
from pipeline.ops.rows import OpCall, axis_in_range, kind, same_dtype, signature, sizes_of

Attrs = Mapping[str, Any]
Outs = Sequence[TensorSpec]


def same_numel(call: OpCall) -> str | None:
    """Reshape keeps the number of elements, where both shapes are known."""
    source, out = call.ins[0], call.outs[0]
    if not (source.is_static and out.is_static) or source.numel == out.numel:
        return None
    return f"{source.numel} elements into {list(out.shape)}, which holds {out.numel}"


def parallel_lists(call: OpCall) -> str | None:
    """Slice: one start, end and step per axis, and steps forwards."""
    lists = [call.attrs[name] for name in ("starts", "ends", "axes", "steps")]
    if len({len(items) for items in lists if isinstance(items, tuple)}) != 1:
        return "attrs starts, ends, axes and steps differ in length"
    return "attr steps holds one below 1" if isinstance(lists[3], tuple) and min(lists[3], default=1) < 1 else None


def permutation(call: OpCall) -> str | None:
    perm, rank = call.attrs["perm"], call.ins[0].rank
    right = isinstance(perm, tuple) and set(perm) == set(range(rank)) and len(perm) == rank
    return None if right else f"attr perm={perm} is no permutation of the {rank} axes"


def reshape(_: Attrs, source: Layout, outs: Outs) -> tuple[Layout] | None:
    """Squeeze, Unsqueeze and Flatten are Reshapes too."""
    layout = source.reshape(outs[0].sizes)
    return None if layout is None else (layout,)


def transpose(attrs: Attrs, source: Layout, _: Outs) -> tuple[Layout]:
    return (source.permute(attrs["perm"]),)


def split(attrs: Attrs, source: Layout, _: Outs) -> tuple[Layout, ...]:
    starts = accumulate(attrs["sizes"], initial=0)
    return tuple(
        source.slice_axis(attrs["axis"], start, size) for start, size in zip(starts, attrs["sizes"], strict=False)
    )


def slice_(attrs: Attrs, source: Layout, _: Outs) -> tuple[Layout]:
    """Bounds clamp as Python's do."""
    for axis, start, end, step in zip(*(attrs[name] for name in ("axes", "starts", "ends", "steps")), strict=True):
        taken = range(*slice(start, end, step).indices(source.sizes[axis]))
        source = source.slice_axis(axis, taken.start if taken else 0, len(taken), step)
    return (source,)


def expand(_: Attrs, source: Layout, outs: Outs) -> tuple[Layout]:
    """ONNX's Expand broadcasts both ways, so the output's shape is the one to follow."""
    return (source.expand(outs[0].sizes),)


def select(attrs: Attrs, source: Layout, _: Outs) -> tuple[Layout]:
    return (source.select(attrs["axis"], attrs["index"]),)


def unbind(attrs: Attrs, source: Layout, outs: Outs) -> tuple[Layout, ...]:
    return tuple(source.select(attrs["axis"], index) for index in range(len(outs)))


def diagonal(attrs: Attrs, source: Layout, _: Outs) -> tuple[Layout]:
    return (source.diagonal(attrs["distance"], attrs["first"], attrs["second"]),)


def unfold(attrs: Attrs, source: Layout, _: Outs) -> tuple[Layout]:
    return (source.unfold(attrs["axis"], attrs["size"], attrs["step"]),)


def keep_layout(_attrs: Attrs, source: Layout, _outs: Outs) -> tuple[Layout]:
    return (source,)


def to_target(call: OpCall) -> str | None:
    """Cast makes what it says."""
    to, dtype = call.attrs["to"], call.outs[0].dtype
    return None if to == dtype else f"attr to={to!r}, but the output is {dtype}"


def contiguous(_attrs: Attrs, source: Layout, _outs: Outs) -> tuple[Layout] | None:
    """Contiguous copies a value that is not row-major, so that its readers are fast."""
    return (source,) if source.is_contiguous else None


MOVED = signature(same_dtype)
ON_AXIS = signature(same_dtype, axis_in_range())
SPLIT = signature(
    same_dtype, axis_in_range(), sizes_of("sizes", lambda call: len(call.outs), "output"), outputs=(1, None)
)
SLICE = signature(same_dtype, axis_in_range("axes"), parallel_lists)
DIAGONAL = signature(same_dtype, axis_in_range("first"), axis_in_range("second"))

KINDS = (
    kind(Kind.Identity, MOVED, view=keep_layout),
    kind(Kind.Cast, signature(to_target), "to=s"),
    kind(Kind.Reshape, signature(same_dtype, same_numel), "shape=i[]", view=reshape),
    kind(Kind.Transpose, signature(same_dtype, permutation), "perm=i[]", view=transpose),
    kind(Kind.Split, SPLIT, "axis=i,sizes=i[]", view=split),
    kind(Kind.Slice, SLICE, "starts=i[],ends=i[],axes=i[],steps=i[]", view=slice_),
    kind(Kind.Expand, MOVED, "shape=i[]", view=expand),
    kind(Kind.Select, ON_AXIS, "axis=i,index=i", view=select),
    kind(Kind.Unbind, signature(same_dtype, axis_in_range(), outputs=(0, None)), "axis=i", view=unbind),
    kind(Kind.Diagonal, DIAGONAL, "distance=i,first=i,second=i", view=diagonal),
    kind(Kind.Unfold, ON_AXIS, "axis=i,size=i,step=i", view=unfold),
    kind(Kind.Contiguous, MOVED, view=contiguous),
)
