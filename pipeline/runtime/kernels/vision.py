"""Kernels on regions of pictures."""

from __future__ import annotations

import math

import torch

from pipeline.ops import Kind
from pipeline.runtime.kernels.base import Attrs, Ins, Kernel, Outs, each_time


def roi_align(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    """Each cell of a region is the mean, or the largest share, of bilinear samples in it."""
    picture, boxes, places = ins
    rows, columns = outs[0].shape[2:]
    offset = 0.5 if attrs["half_pixel"] else 0.0
    for at, (box, place) in enumerate(
        zip((boxes.double() * attrs["spatial_scale"] - offset).tolist(), places.tolist(), strict=True)
    ):
        left, top, right, bottom = box
        width, height = right - left, bottom - top
        if not attrs["half_pixel"]:
            width, height = max(width, 1.0), max(height, 1.0)
        down = attrs["sampling_ratio"] or max(math.ceil(height / rows), 1)
        across = attrs["sampling_ratio"] or max(math.ceil(width / columns), 1)
        y = sample_places(top, height / rows, rows, down)
        x = sample_places(left, width / columns, columns, across)
        shares = _samples(picture[place], y, x, outs[0].dtype)
        cells = shares.reshape(4, -1, rows, down, columns, across)
        if attrs["mode"] == "avg":
            outs[0][at] = cells.sum(0).mean((2, 4))
        else:
            outs[0][at] = cells.amax(0).amax((2, 4))


def sample_places(begin: float, size: float, count: int, samples: int) -> torch.Tensor:
    """The places of `samples` samples in each of `count` cells."""
    return begin + size * (torch.arange(count * samples, dtype=torch.float64) + 0.5) / samples


def _samples(picture: torch.Tensor, y: torch.Tensor, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The four weighted neighbours [4, channels, len(y), len(x)]; 0 for a place more than 1 outside of the picture."""
    height, width = picture.shape[1:]
    (top, bottom, y_share), (left, right, x_share) = _neighbours(y, height), _neighbours(x, width)
    inside = ((y >= -1) & (y <= height)).unsqueeze(1) & ((x >= -1) & (x <= width)).unsqueeze(0)
    corners = []
    for rows, by_row in ((top, 1 - y_share), (bottom, y_share)):
        for columns, by_column in ((left, 1 - x_share), (right, x_share)):
            share = (by_row.unsqueeze(1) * by_column.unsqueeze(0) * inside).to(dtype)
            corners.append(picture[:, rows][:, :, columns] * share)
    return torch.stack(corners)


def _neighbours(places: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The elements before and after each place, and the share of the one after."""
    places = places.clamp(0, size - 1)
    low = places.long()
    return low, (low + 1).clamp(max=size - 1), places - low


KERNELS: dict[Kind, Kernel] = {Kind.RoiAlign: each_time(roi_align)}
