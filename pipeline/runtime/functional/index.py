"""Forms that read or write at positions held in a tensor. A negative index counts from the end."""

from __future__ import annotations

import torch
from torch.nn import functional

from pipeline.ops import Kind
from pipeline.runtime.functional.base import Attrs, Form, Ins, Specs

REDUCTIONS = {"add": "sum", "mul": "prod", "min": "amin", "max": "amax"}

MODES = {"linear": "bilinear", "cubic": "bicubic", "nearest": "nearest"}


def gather(ins: Ins, attrs: Attrs, outs: Specs) -> torch.Tensor:
    x, axis = ins[0], attrs["axis"] % ins[0].dim()
    rows = _from_start(ins[1], x.shape[axis]).reshape(-1)
    return x.index_select(axis, rows).reshape(outs[0].sizes)


def gather_elements(ins: Ins, attrs: Attrs, _: Specs) -> torch.Tensor:
    return ins[0].gather(attrs["axis"], _from_start(ins[1], ins[0].shape[attrs["axis"]]))


def gather_nd(ins: Ins, attrs: Attrs, _: Specs) -> torch.Tensor:
    """Torch's own indexing by several tensors; the leading axes of a batch index themselves."""
    x, indices, batch = ins[0], ins[1].long(), attrs["batch_dims"]
    rank = indices.dim() - 1
    own = [
        torch.arange(size).view([-1 if place == axis else 1 for place in range(rank)])
        for axis, size in enumerate(x.shape[:batch])
    ]
    return x[(*own, *indices.unbind(-1))]


def scatter_nd(ins: Ins, attrs: Attrs, _: Specs) -> torch.Tensor:
    data, updates = ins[0], ins[2]
    places = ins[1].long().unbind(-1)
    if attrs["reduction"] in ("none", "add"):
        return data.index_put(places, updates, accumulate=attrs["reduction"] == "add")
    depth = len(places)
    flat = torch.zeros_like(places[0])
    for size, place in zip(data.shape[:depth], places, strict=True):
        flat = flat * size + _from_start(place, size)
    rows = data.flatten(0, depth - 1).flatten(1) if data.dim() > depth else data.reshape(-1, 1)
    updates = updates.reshape(flat.numel(), rows.shape[1])
    at = flat.reshape(-1, 1).expand_as(updates)
    return rows.scatter_reduce(0, at, updates, REDUCTIONS[attrs["reduction"]]).reshape(data.shape)


def scatter_elements(ins: Ins, attrs: Attrs, _: Specs) -> torch.Tensor:
    data, axis = ins[0], attrs["axis"]
    at = _from_start(ins[1], data.shape[axis])
    if attrs["reduction"] == "none":
        return data.scatter(axis, at, ins[2])
    return data.scatter_reduce(axis, at, ins[2], REDUCTIONS[attrs["reduction"]])


def grid_sample(ins: Ins, attrs: Attrs, _: Specs) -> torch.Tensor:
    return functional.grid_sample(ins[0], ins[1], MODES[attrs["mode"]], attrs["padding"], attrs["align_corners"])


def top_k(ins: Ins, attrs: Attrs, _: Specs) -> tuple[torch.Tensor, torch.Tensor]:
    """Of equal values the one with the lower index comes first, which a stable sort gives."""
    values, positions = ins[0].sort(dim=attrs["axis"], descending=attrs["largest"], stable=True)
    return values.narrow(attrs["axis"], 0, attrs["k"]), positions.narrow(attrs["axis"], 0, attrs["k"])


def _from_start(indices: torch.Tensor, size: int) -> torch.Tensor:
    indices = indices.long()
    return indices + size * (indices < 0)


FORMS: dict[Kind, Form] = {
    Kind.Gather: gather,
    Kind.GatherElements: gather_elements,
    Kind.GatherND: gather_nd,
    Kind.ScatterND: scatter_nd,
    Kind.ScatterElements: scatter_elements,
    Kind.GridSample: grid_sample,
    Kind.TopK: top_k,
}
