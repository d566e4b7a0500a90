"""Reductions over named axes, arg-reductions, and the running sum."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.ir.builder import Emitter
from pipeline.ir.graph import Attr
from pipeline.lowering.emitter import Specs, axis_in_range, emitter, floating, same_dtype
from pipeline.lowering.kinds import Kind
from pipeline.lowering.layout import ViewRule

__all__ = ["EMITTERS", "INPLACE", "VIEWS"]


def reduction(kind: Kind) -> Emitter:
    return emitter(kind, "axes=i[],keepdims=?", same_dtype, some_axes, axis_in_range("axes"))


def arg_reduction(kind: Kind) -> Emitter:
    return emitter(kind, "axis=i,keepdims=?", axis_in_range(), to_int64)


def some_axes(attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> str | None:
    """No axes means "all" in one front end and "none" in another; here the axes are always spelled out."""
    del outs
    if attrs["axes"] or not ins[0].rank:
        return None
    return "attr axes=() is ambiguous; spell out every axis, or use Identity where nothing is reduced"


def to_int64(attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> str | None:
    del attrs, ins
    return None if outs[0].dtype == "int64" else f"output dtype {outs[0].dtype}; expected int64"


EMITTERS: dict[str, Emitter] = {
    "ReduceSum": reduction(Kind.ReduceSum),
    "ReduceMean": reduction(Kind.ReduceMean),
    "ReduceMax": reduction(Kind.ReduceMax),
    "ReduceMin": reduction(Kind.ReduceMin),
    "ReduceProd": reduction(Kind.ReduceProd),
    "ReduceL2": reduction(Kind.ReduceL2),
    "ReduceLogSumExp": emitter(
        Kind.ReduceLogSumExp, "axes=i[],keepdims=?", same_dtype, floating, some_axes, axis_in_range("axes")
    ),
    "ArgMax": arg_reduction(Kind.ArgMax),
    "ArgMin": arg_reduction(Kind.ArgMin),
    "CumSum": emitter(Kind.CumSum, "axis=i,exclusive=?,reverse=?", same_dtype, axis_in_range()),
}

INPLACE: dict[str, tuple[int, ...]] = {}

VIEWS: dict[str, ViewRule] = {}
