"""Kinds that move elements and compute nothing. Sizes in attrs are concrete: the importer resolved -1 and 0."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from pipeline.ir.builder import Emitter
from pipeline.ir.graph import Attr
from pipeline.lowering.emitter import Specs, axis_in_range, emitter, one_of, same_dtype, sizes_of
from pipeline.lowering.kinds import Kind
from pipeline.lowering.layout import Layout, ViewRule

__all__ = ["EMITTERS", "INPLACE", "VIEWS"]


def input_rank(ins: Specs, outs: Specs) -> int:
    del outs
    return ins[0].rank


def same_numel(attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> str | None:
    """Reshape keeps the number of elements, where both shapes are known."""
    del attrs
    if not (ins[0].is_static and outs[0].is_static) or ins[0].numel == outs[0].numel:
        return None
    return f"{ins[0].numel} elements into {list(outs[0].shape)}, which holds {outs[0].numel}"


def parallel_lists(attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> str | None:
    """Slice: one start, end and step per axis, and no step of zero."""
    del ins, outs
    lists = [attrs[name] for name in ("starts", "ends", "axes", "steps")]
    if len({len(items) for items in lists if isinstance(items, tuple)}) != 1:
        return "attrs starts, ends, axes and steps differ in length"
    return "attr steps holds 0" if isinstance(lists[3], tuple) and 0 in lists[3] else None


def permutation(attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> str | None:
    del outs
    perm = attrs["perm"]
    right = isinstance(perm, tuple) and set(perm) == set(range(ins[0].rank)) and len(perm) == ins[0].rank
    return None if right else f"attr perm={perm} is no permutation of the {ins[0].rank} axes"


def reshaped(attrs: Mapping[str, Any], source: Layout, outs: Specs) -> tuple[Layout] | None:
    """Squeeze, Unsqueeze and Flatten are Reshapes too."""
    del attrs
    layout = source.reshaped(outs[0].sizes)
    return None if layout is None else (layout,)


def permuted(attrs: Mapping[str, Any], source: Layout, outs: Specs) -> tuple[Layout]:
    del outs
    return (source.permuted(attrs["perm"]),)


def pieces(attrs: Mapping[str, Any], source: Layout, outs: Specs) -> tuple[Layout, ...]:
    del outs
    starts = accumulate(attrs["sizes"], initial=0)
    return tuple(source.sliced(attrs["axis"], start, size) for start, size in zip(starts, attrs["sizes"], strict=False))


def sliced(attrs: Mapping[str, Any], source: Layout, outs: Specs) -> tuple[Layout] | None:
    """Bounds clamp as Python's do. A negative step is a copy, since a stride is not negative."""
    del outs
    if any(step < 0 for step in attrs["steps"]):
        return None
    for axis, start, end, step in zip(*(attrs[name] for name in ("axes", "starts", "ends", "steps")), strict=True):
        taken = range(*slice(start, end, step).indices(source.sizes[axis]))
        source = source.sliced(axis, taken.start if taken else 0, len(taken), step)
    return (source,)


def expanded(attrs: Mapping[str, Any], source: Layout, outs: Specs) -> tuple[Layout]:
    """ONNX's Expand broadcasts both ways, so the output's shape is the one to follow."""
    del attrs
    return (source.expanded(outs[0].sizes),)


def selected(attrs: Mapping[str, Any], source: Layout, outs: Specs) -> tuple[Layout]:
    del outs
    return (source.selected(attrs["axis"], attrs["index"]),)


def unbound(attrs: Mapping[str, Any], source: Layout, outs: Specs) -> tuple[Layout, ...]:
    return tuple(source.selected(attrs["axis"], index) for index in range(len(outs)))


def diagonal(attrs: Mapping[str, Any], source: Layout, outs: Specs) -> tuple[Layout]:
    del outs
    return (source.diagonal(attrs["distance"], attrs["first"], attrs["second"]),)


def unfolded(attrs: Mapping[str, Any], source: Layout, outs: Specs) -> tuple[Layout]:
    del outs
    return (source.unfolded(attrs["axis"], attrs["size"], attrs["step"]),)


def in_rows(attrs: Mapping[str, Any], source: Layout, outs: Specs) -> tuple[Layout] | None:
    """Contiguous copies what does not lie row after row, so that what reads it is fast."""
    del attrs, outs
    return (source,) if source.is_contiguous else None


EMITTERS: dict[str, Emitter] = {
    "Reshape": emitter(Kind.Reshape, "shape=i[]", same_dtype, same_numel),
    "Transpose": emitter(Kind.Transpose, "perm=i[]", same_dtype, permutation),
    "Concat": emitter(Kind.Concat, "axis=i", same_dtype, axis_in_range(), inputs=(1, None)),
    "Split": emitter(
        Kind.Split,
        "axis=i,sizes=i[]",
        same_dtype,
        axis_in_range(),
        sizes_of("sizes", lambda _, outs: len(outs), "output"),
        outputs=(1, None),
    ),
    "Slice": emitter(
        Kind.Slice, "starts=i[],ends=i[],axes=i[],steps=i[]", same_dtype, axis_in_range("axes"), parallel_lists
    ),
    "Expand": emitter(Kind.Expand, "shape=i[]", same_dtype),
    "Tile": emitter(Kind.Tile, "repeats=i[]", same_dtype, sizes_of("repeats", input_rank, "axis")),
    "Pad": emitter(
        Kind.Pad,
        "pads=i[],mode=s,value=n",
        same_dtype,
        one_of("mode", "constant", "reflect", "edge"),
        sizes_of("pads", lambda ins, _: 2 * ins[0].rank, "side of an axis"),
    ),
    "Select": emitter(Kind.Select, "axis=i,index=i", same_dtype, axis_in_range()),
    "Unbind": emitter(Kind.Unbind, "axis=i", same_dtype, axis_in_range(), outputs=(0, None)),
    "Diagonal": emitter(
        Kind.Diagonal, "distance=i,first=i,second=i", same_dtype, axis_in_range("first"), axis_in_range("second")
    ),
    "Unfold": emitter(Kind.Unfold, "axis=i,size=i,step=i", same_dtype, axis_in_range()),
    "Contiguous": emitter(Kind.Contiguous, "", same_dtype),
}

INPLACE: dict[str, tuple[int, ...]] = {}

VIEWS: dict[str, ViewRule] = {
    "Reshape": reshaped,
    "Transpose": permuted,
    "Split": pieces,
    "Slice": sliced,
    "Expand": expanded,
    "Select": selected,
    "Unbind": unbound,
    "Diagonal": diagonal,
    "Unfold": unfolded,
    "Contiguous": in_rows,
}
