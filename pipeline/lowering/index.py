"""Kinds that read or write at positions held in a tensor. Negative indices count from the end, as in ONNX."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.ir.builder import Emitter
from pipeline.ir.graph import Attr
from pipeline.lowering.emitter import Specs, axis_in_range, emitter, floating, one_of, same_dtype
from pipeline.lowering.kinds import Kind
from pipeline.lowering.layout import ViewRule

__all__ = ["EMITTERS", "INPLACE", "VIEWS"]

INDEX_DTYPES = ("int32", "int64")


def indexed(attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> str | None:
    """Input 1 holds indices; everything else has the dtype of the data."""
    if ins[1].dtype not in INDEX_DTYPES:
        return f"indices of dtype {ins[1].dtype}; expected one of {list(INDEX_DTYPES)}"
    return same_dtype(attrs, (ins[0], *ins[2:]), outs)


def ranked(attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> str | None:
    """TopK: the values like the input, then int64 positions."""
    if outs[1].dtype != "int64":
        return f"positions of dtype {outs[1].dtype}; expected int64"
    return same_dtype(attrs, ins, outs[:1])


EMITTERS: dict[str, Emitter] = {
    "Gather": emitter(Kind.Gather, "axis=i", indexed, axis_in_range(), inputs=2),
    "GatherElements": emitter(Kind.GatherElements, "axis=i", indexed, axis_in_range(), inputs=2),
    "GatherND": emitter(Kind.GatherND, "batch_dims=i", indexed, inputs=2),
    "ScatterND": emitter(
        Kind.ScatterND, "reduction=s", indexed, one_of("reduction", "none", "add", "mul", "min", "max"), inputs=3
    ),
    "ScatterElements": emitter(
        Kind.ScatterElements,
        "axis=i,reduction=s",
        indexed,
        axis_in_range(),
        one_of("reduction", "none", "add", "mul", "min", "max"),
        inputs=3,
    ),
    "GridSample": emitter(
        Kind.GridSample,
        "mode=s,padding=s,align_corners=?",
        same_dtype,
        floating,
        one_of("mode", "linear", "nearest", "cubic"),
        one_of("padding", "zeros", "border", "reflection"),
        inputs=2,
    ),
    "TopK": emitter(Kind.TopK, "axis=i,largest=?,k=i", ranked, axis_in_range(), outputs=2),
}

# Both scatters start from a copy of their data; written in place, the copy is free.
INPLACE: dict[str, tuple[int, ...]] = {"ScatterND": (0,), "ScatterElements": (0,)}

VIEWS: dict[str, ViewRule] = {}
