"""Kinds that read or write at positions held in a tensor. Negative indices count from the end, as in ONNX."""

from __future__ import annotations

from dataclasses import replace

from pipeline.ops.kinds import Kind
from pipeline.ops.rows import OpCall, axis_in_range, floating, kind, one_of, same_dtype, signature

INDEX_DTYPES = ("int32", "int64")


def integer_indices(call: OpCall) -> str | None:
    """Input 1 holds indices; everything else has the dtype of the data."""
    data, indices, *rest = call.ins
    if indices.dtype not in INDEX_DTYPES:
        return f"indices of dtype {indices.dtype}; expected one of {list(INDEX_DTYPES)}"
    return same_dtype(replace(call, ins=(data, *rest)))


def top_k_outputs(call: OpCall) -> str | None:
    """TopK: values of the input's dtype, then int64 positions."""
    if call.outs[1].dtype != "int64":
        return f"positions of dtype {call.outs[1].dtype}; expected int64"
    return same_dtype(replace(call, outs=call.outs[:1]))


ALONG_AXIS = signature(integer_indices, axis_in_range(), inputs=2)
REDUCTIONS = one_of("reduction", "none", "add", "mul", "min", "max")
GRID_SAMPLE = signature(
    same_dtype,
    floating,
    one_of("mode", "linear", "nearest", "cubic"),
    one_of("padding", "zeros", "border", "reflection"),
    inputs=2,
)

# Both scatters start from a copy of their data; written in place, the copy is free.
KINDS = (
    kind(Kind.Gather, ALONG_AXIS, "axis=i"),
    kind(Kind.GatherElements, ALONG_AXIS, "axis=i"),
    kind(Kind.GatherND, signature(integer_indices, inputs=2), "batch_dims=i"),
    kind(Kind.ScatterND, signature(integer_indices, REDUCTIONS, inputs=3), "reduction=s", inplace=(0,)),
    kind(
        Kind.ScatterElements,
        signature(integer_indices, axis_in_range(), REDUCTIONS, inputs=3),
        "axis=i,reduction=s",
        inplace=(0,),
    ),
    kind(Kind.GridSample, GRID_SAMPLE, "mode=s,padding=s,align_corners=?"),
    kind(Kind.TopK, signature(top_k_outputs, axis_in_range(), outputs=2), "axis=i,largest=?,k=i"),
)
