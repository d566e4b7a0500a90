"""Resizing."""

from __future__ import annotations

import torch

from pipeline.ops import Kind
from pipeline.runtime.functional.base import Attrs, Form, Ins, Specs


def resize(ins: Ins, attrs: Attrs, outs: Specs) -> torch.Tensor:
    """Each new element of an axis reads one old element, or two with shares that sum up to one."""
    x = ins[0]
    for axis, (scale, size) in enumerate(zip(attrs["scales"], outs[0].sizes, strict=True)):
        old = x.shape[axis]
        if scale == 1 and size == old:
            continue
        at = _positions(old, size, scale, attrs["coordinates"])
        if attrs["mode"] == "nearest":
            x = x.index_select(axis, _nearest(at, attrs["nearest"]).clamp(0, old - 1))
            continue
        at = at.clamp(0, old - 1)
        below = at.floor().long()
        share = (at - below).to(x.dtype).view([-1 if own == axis else 1 for own in range(x.dim())])
        above = (below + 1).clamp(max=old - 1)
        x = x.index_select(axis, below) * (1 - share) + x.index_select(axis, above) * share
    return x if x is not ins[0] else x.clone()


def _positions(old: int, new: int, scale: float, coordinates: str) -> torch.Tensor:
    """The place of each new element among the old ones; the names are those of ONNX's Resize."""
    at = torch.arange(new, dtype=torch.float64)
    match coordinates:
        case "asymmetric":
            return at / scale
        case "align_corners":
            return at * ((old - 1) / (new - 1)) if new > 1 else at * 0
        case "pytorch_half_pixel" if new == 1:
            return at
        case "half_pixel_symmetric":
            shift = old / 2 * (1 - new / (scale * old))
            return shift + (at + 0.5) / scale - 0.5
    return (at + 0.5) / scale - 0.5


def _nearest(at: torch.Tensor, rule: str) -> torch.Tensor:
    if rule == "floor" or rule == "ceil":
        return (at.floor() if rule == "floor" else at.ceil()).long()
    return ((at - 0.5).ceil() if rule == "round_prefer_floor" else (at + 0.5).floor()).long()


FORMS: dict[Kind, Form] = {
    Kind.Resize: resize,
}
