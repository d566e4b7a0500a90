"""Resizing."""

from __future__ import annotations

import torch

from pipeline.ops import Kind
from pipeline.runtime.kernels.base import Attrs, Ins, Kernel, Outs, each_time

NEAREST = {
    "round_prefer_floor": lambda places: torch.ceil(places - 0.5),
    "round_prefer_ceil": lambda places: torch.floor(places + 0.5),
    "floor": torch.floor,
    "ceil": torch.ceil,
}


def resize(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    """One axis after the other: nearest picks an element, linear interpolates between two."""
    x, out = ins[0], outs[0]
    for axis, scale in enumerate(attrs["scales"]):
        size = x.shape[axis]
        if scale == 1 and size == out.shape[axis]:
            continue
        places = _places(size, out.shape[axis], scale, attrs["coordinates"])
        if attrs["mode"] == "nearest":
            x = x.index_select(axis, NEAREST[attrs["nearest"]](places).long().clamp(0, size - 1))
            continue
        places = places.clamp(0, size - 1)
        low = places.long()
        share = (places - low).to(x.dtype).reshape([-1 if at == axis else 1 for at in range(x.dim())])
        x = torch.lerp(x.index_select(axis, low), x.index_select(axis, (low + 1).clamp(max=size - 1)), share)
    out.copy_(x)


def _places(size: int, new_size: int, scale: float, coordinates: str) -> torch.Tensor:
    """The position of each new element among the old ones, by the formulas of ONNX's Resize."""
    at = torch.arange(new_size, dtype=torch.float64)
    if coordinates == "asymmetric":
        return at / scale
    if coordinates == "align_corners":
        return at * ((size - 1) / max(new_size - 1, 1))
    if coordinates == "pytorch_half_pixel" and new_size == 1:
        return at
    places = (at + 0.5) / scale - 0.5
    if coordinates == "half_pixel_symmetric":
        places += size / 2 * (1 - new_size / (scale * size))
    return places


KERNELS: dict[Kind, Kernel] = {
    Kind.Resize: each_time(resize),
}
