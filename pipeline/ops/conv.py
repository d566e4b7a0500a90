"""Resizing."""

from __future__ import annotations

from pipeline.ops.kinds import Kind
from pipeline.ops.rows import kind, one_of, same_dtype, signature, sizes_of

COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")


RESIZE = signature(
    same_dtype,
    one_of("mode", "nearest", "linear"),
    one_of("coordinates", *COORDINATES),
    one_of("nearest", "round_prefer_floor", "round_prefer_ceil", "floor", "ceil"),
    sizes_of("scales", lambda call: call.ins[0].rank, "dimension"),
)

KINDS = (kind(Kind.Resize, RESIZE, "mode=s,scales=f[],coordinates=s,nearest=s"),)
