"""Kinds on regions of pictures."""

from __future__ import annotations

from dataclasses import replace

from pipeline.ops.kinds import Kind
from pipeline.ops.rows import OpCall, floating, kind, one_of, same_dtype, signature


def regions(call: OpCall) -> str | None:
    """A picture [batch, channels, height, width], regions [count, 4], and the place of each in the batch."""
    picture, boxes, places = call.ins
    if (picture.rank, boxes.rank, places.rank) != (4, 2, 1) or boxes.shape[1] != 4 or places.shape != boxes.shape[:1]:
        return f"shapes {[spec.shape for spec in call.ins]}; expected [n, c, h, w], [count, 4] and [count]"
    if places.dtype != "int64":
        return f"places of dtype {places.dtype}; expected int64"
    return same_dtype(replace(call, ins=call.ins[:2]))


KINDS = (
    kind(
        Kind.RoiAlign,
        signature(floating, one_of("mode", "avg", "max"), regions, inputs=3),
        "mode=s,half_pixel=?,sampling_ratio=i,spatial_scale=f",
    ),
)
