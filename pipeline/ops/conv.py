"""Convolutions and pooling over 1 to 3 spatial dimensions, and resizing; pads are every begin, then every end."""

from __future__ import annotations

from pipeline.ops.kinds import Kind
from pipeline.ops.rows import OpCall, kind, one_of, per_spatial_dim, same_dtype, signature, sizes_of

COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")


def weight_rank(call: OpCall) -> str | None:
    x, weight = call.ins[0].rank, call.ins[1].rank
    return None if weight == x else f"weight of rank {weight} for an input of rank {x}; expected the same rank"


CONV = signature(same_dtype, weight_rank, *per_spatial_dim("strides", "pads", "dilations"), inputs=(2, 3))
CONV_TRANSPOSE = signature(
    same_dtype, weight_rank, *per_spatial_dim("strides", "pads", "output_padding", "dilations"), inputs=(2, 3)
)
MAX_POOL = signature(same_dtype, *per_spatial_dim("kernel", "strides", "pads", "dilations"))
AVERAGE_POOL = signature(same_dtype, *per_spatial_dim("kernel", "strides", "pads"))
GLOBAL_POOL = signature(same_dtype, *per_spatial_dim())
RESIZE = signature(
    same_dtype,
    one_of("mode", "nearest", "linear"),
    one_of("coordinates", *COORDINATES),
    one_of("nearest", "round_prefer_floor", "round_prefer_ceil", "floor", "ceil"),
    sizes_of("scales", lambda call: call.ins[0].rank, "dimension"),
)

KINDS = (
    kind(Kind.Conv, CONV, "strides=i[],pads=i[],dilations=i[],group=i"),
    kind(Kind.ConvTranspose, CONV_TRANSPOSE, "strides=i[],pads=i[],output_padding=i[],dilations=i[],group=i"),
    kind(Kind.MaxPool, MAX_POOL, "kernel=i[],strides=i[],pads=i[],dilations=i[],ceil_mode=?"),
    kind(Kind.AveragePool, AVERAGE_POOL, "kernel=i[],strides=i[],pads=i[],ceil_mode=?,count_include_pad=?"),
    kind(Kind.GlobalAveragePool, GLOBAL_POOL),
    kind(Kind.GlobalMaxPool, GLOBAL_POOL),
    kind(Kind.Resize, RESIZE, "mode=s,scales=f[],coordinates=s,nearest=s"),
)
