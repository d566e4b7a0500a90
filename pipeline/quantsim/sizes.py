"""Bytes of the constants of a model, in float and quantized, from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

from onnx import helper

from passes.weights.detached import DetachedModel
from pipeline.quantsim.placement import PlacedSite, Placement


def weight_bytes(model: DetachedModel, placement: Placement) -> tuple[int, int]:
    """Bytes of all constants, before and after; scales and zero points count."""
    placed = {found.site.tensor: found for found in placement.sites}
    before = after = 0
    for tensor in model.proto.graph.initializer:
        count = math.prod(tensor.dims)
        size = count * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        before += size
        found = placed.get(tensor.name)
        if found is None or found.precision is None:
            after += size
            continue
        bits, scales = found.precision.stored_bits, _count_scales(tuple(tensor.dims), found, placed)
        after += -(-count * bits // 8) + 4 * scales + -(-scales * bits // 8)
    return before, after


def _count_scales(dims: tuple[int, ...], found: PlacedSite, placed: Mapping[str, PlacedSite]) -> int:
    site, precision = found.site, found.precision
    if site.bias_of is not None:  # its scales are those of the weight
        precision = placed[site.bias_of[1]].precision
        return dims[0] if precision is not None and precision.granularity == "channel" else 1
    if precision is None or precision.granularity == "tensor":
        return 1
    if precision.granularity == "channel":
        return 1 if site.channel_axis is None else dims[site.channel_axis]
    axis = site.summed_axis or 0
    return math.prod(-(-size // precision.block) if place == axis else size for place, size in enumerate(dims))
