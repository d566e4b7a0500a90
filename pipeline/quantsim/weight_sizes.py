"""Bytes of a model's constants with a placement, computed from their shapes: nothing is quantized for it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from onnx import helper

from passes.graph.op_facts import opset_of
from passes.weights.detached import DetachedModel
from pipeline.quantsim.placement import PlacedSite, Placement
from pipeline.quantsim.qdq import stored_bits


def weight_bytes(
    model: DetachedModel, placement: Placement, leave_out: Collection[str] = frozenset()
) -> tuple[int, int]:
    """Bytes of the constants of `model` in float, and with `placement`, scales and zero points included.

    Args:
        model: the model in float.
        placement: the format of each tensor.
        leave_out: constants that do not count.
    """
    placed = {found.site.tensor: found for found in placement.sites}
    fed = {value.name for value in model.proto.graph.input}  # which stay in float, as callers may feed others
    before = after = 0
    for tensor in (tensor for tensor in model.proto.graph.initializer if tensor.name not in leave_out):
        count = math.prod(tensor.dims)
        size = count * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        before += size
        found = placed.get(tensor.name)
        if found is None or found.precision is None:
            after += size
            continue
        bits = stored_bits(found.precision, opset_of(model.proto))
        scales = _count_scales(tuple(tensor.dims), found, placed)
        after += size if tensor.name in fed else -(-count * bits // 8)
        after += scales if found.precision.scale_type else 4 * scales + -(-scales * bits // 8)
    return before, after


def _count_scales(dims: tuple[int, ...], found: PlacedSite, placed: Mapping[str, PlacedSite]) -> int:
    """How many scales the constant of the shape `dims` has; a bias has those of its weight."""
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
