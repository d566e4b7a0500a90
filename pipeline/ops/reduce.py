"""Kinds that compute along axes: reductions, the running sum, softmaxes and normalisations."""

from __future__ import annotations

from pipeline.ops.kinds import Kind
from pipeline.ops.rows import OpCall, axis_in_range, floating, kind, rows, same_dtype, signature


def some_axes(call: OpCall) -> str | None:
    """No axes means "all" in one front end and "none" in another; here the axes are always spelled out."""
    if call.attrs["axes"] or not call.ins[0].rank:
        return None
    return "attr axes=() is ambiguous; spell out every axis, or use Identity where nothing is reduced"


def to_int64(call: OpCall) -> str | None:
    dtype = call.outs[0].dtype
    return None if dtype == "int64" else f"output dtype {dtype}; expected int64"


REDUCTION = signature(same_dtype, some_axes, axis_in_range("axes"))
FLOAT_REDUCTION = signature(same_dtype, floating, some_axes, axis_in_range("axes"))
ARG_REDUCTION = signature(axis_in_range(), to_int64)
SOFTMAX = signature(same_dtype, floating, axis_in_range())
LAYER_NORM = signature(same_dtype, floating, axis_in_range(), inputs=(2, 3))
RMS_NORM = signature(same_dtype, floating, axis_in_range(), inputs=2)
GROUPED = signature(same_dtype, floating, inputs=3)

# Torch has no out= form of the normalisations, so their kernels compute into scratch and write the output last: they
# may write over input 0. Softmax writes its output while it still reads its input, and may not.
KINDS = (
    *rows(
        (Kind.ReduceSum, Kind.ReduceMean, Kind.ReduceMax, Kind.ReduceMin, Kind.ReduceProd, Kind.ReduceL2),
        REDUCTION,
        "axes=i[],keepdims=?",
    ),
    kind(Kind.ReduceLogSumExp, FLOAT_REDUCTION, "axes=i[],keepdims=?"),
    *rows((Kind.ArgMax, Kind.ArgMin), ARG_REDUCTION, "axis=i,keepdims=?"),
    kind(Kind.CumSum, signature(same_dtype, axis_in_range()), "axis=i,exclusive=?,reverse=?"),
    *rows((Kind.Softmax, Kind.LogSoftmax), SOFTMAX, "axis=i"),
    kind(Kind.LayerNormalization, LAYER_NORM, "axis=i,epsilon=f", inplace=(0,)),
    kind(Kind.RMSNormalization, RMS_NORM, "axis=i,epsilon=f", inplace=(0,)),
    kind(Kind.BatchNormalization, signature(floating, inputs=5), "epsilon=f", inplace=(0,)),
    kind(Kind.InstanceNormalization, GROUPED, "epsilon=f", inplace=(0,)),
    kind(Kind.GroupNormalization, GROUPED, "groups=i,epsilon=f", inplace=(0,)),
)
