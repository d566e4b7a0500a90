"""Convolutions and pooling over 1 to 3 spatial dimensions, and resizing; pads are every begin, then every end."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.ir.builder import Emitter
from pipeline.ir.graph import Attr
from pipeline.lowering.emitter import Specs, emitter, one_of, per_spatial_dim, same_dtype, sizes_of
from pipeline.lowering.kinds import Kind
from pipeline.lowering.layout import ViewRule

__all__ = ["EMITTERS", "INPLACE", "VIEWS"]


COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")


def weight_rank(attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> str | None:
    del attrs, outs
    if ins[1].rank == ins[0].rank:
        return None
    return f"weight of rank {ins[1].rank} for an input of rank {ins[0].rank}; expected the same rank"


EMITTERS: dict[str, Emitter] = {
    "Conv": emitter(
        Kind.Conv,
        "strides=i[],pads=i[],dilations=i[],group=i",
        same_dtype,
        weight_rank,
        *per_spatial_dim("strides", "pads", "dilations"),
        inputs=(2, 3),
    ),
    "ConvTranspose": emitter(
        Kind.ConvTranspose,
        "strides=i[],pads=i[],output_padding=i[],dilations=i[],group=i",
        same_dtype,
        weight_rank,
        *per_spatial_dim("strides", "pads", "output_padding", "dilations"),
        inputs=(2, 3),
    ),
    "MaxPool": emitter(
        Kind.MaxPool,
        "kernel=i[],strides=i[],pads=i[],dilations=i[],ceil_mode=?",
        same_dtype,
        *per_spatial_dim("kernel", "strides", "pads", "dilations"),
    ),
    "AveragePool": emitter(
        Kind.AveragePool,
        "kernel=i[],strides=i[],pads=i[],ceil_mode=?,count_include_pad=?",
        same_dtype,
        *per_spatial_dim("kernel", "strides", "pads"),
    ),
    "GlobalAveragePool": emitter(Kind.GlobalAveragePool, "", same_dtype, *per_spatial_dim()),
    "GlobalMaxPool": emitter(Kind.GlobalMaxPool, "", same_dtype, *per_spatial_dim()),
    "Resize": emitter(
        Kind.Resize,
        "mode=s,scales=f[],coordinates=s,nearest=s",
        same_dtype,
        one_of("mode", "nearest", "linear"),
        one_of("coordinates", *COORDINATES),
        one_of("nearest", "round_prefer_floor", "round_prefer_ceil", "floor", "ceil"),
        sizes_of("scales", lambda ins, outs: ins[0].rank, "dimension"),
    ),
}

INPLACE: dict[str, tuple[int, ...]] = {}

VIEWS: dict[str, ViewRule] = {}
