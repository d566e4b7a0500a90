"""Kernels that read or write at positions held in a tensor. An index may be negative; one out of range raises."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from pipeline.ops import Kind
from pipeline.runtime.kernels.base import Attrs, Ins, Kernel, Outs, each_time

REDUCTIONS = {"mul": "prod", "min": "amin", "max": "amax"}


def gather(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    x, axis = ins[0], attrs["axis"] % ins[0].dim()
    rows = _wrap(ins[1], x.shape[axis]).reshape(-1)
    flat = outs[0].view((*x.shape[:axis], rows.numel(), *x.shape[axis + 1 :]))
    torch.index_select(x, axis, rows, out=flat)


def gather_elements(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    x, axis = ins[0], attrs["axis"]
    torch.gather(x, axis, _wrap(ins[1], x.shape[axis]).long(), out=outs[0])


def gather_nd(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    """The indexed axes are flattened into one, from which rows are selected by flat position."""
    x, indices, batch = ins[0], ins[1], attrs["batch_dims"]
    depth = indices.shape[-1]
    indexed, rest = x.shape[batch : batch + depth], x.shape[batch + depth :]
    batches = math.prod(x.shape[:batch])
    flat = _flat_positions(indices, indexed).reshape(batches, -1)
    flat = flat + torch.arange(batches).unsqueeze(1) * math.prod(indexed)
    rows = x.reshape(batches * math.prod(indexed), math.prod(rest))
    torch.index_select(rows, 0, flat.reshape(-1), out=outs[0].view(flat.numel(), math.prod(rest)))


def scatter_nd(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    """A copy of the data, with rows replaced, or added, multiplied and so on."""
    data, indices, updates = ins
    depth = indices.shape[-1]
    outs[0].copy_(data)
    rows = outs[0].view(math.prod(data.shape[:depth]), math.prod(data.shape[depth:]))
    flat = _flat_positions(indices, data.shape[:depth]).reshape(-1)
    updates = updates.reshape(flat.numel(), rows.shape[1])
    if attrs["reduction"] == "none":
        rows.index_copy_(0, flat, updates)
    elif attrs["reduction"] == "add":
        rows.index_add_(0, flat, updates)
    else:
        at = flat.unsqueeze(1).expand_as(updates)
        rows.scatter_reduce_(0, at, updates, REDUCTIONS[attrs["reduction"]], include_self=True)


def scatter_elements(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    """A copy of the data, with single elements replaced, or added, multiplied and so on."""
    data, indices, updates = ins
    axis, size = attrs["axis"], data.shape[attrs["axis"]]
    at = _wrap(indices, size).long()
    outs[0].copy_(data)
    if attrs["reduction"] == "none":
        outs[0].scatter_(axis, at, updates)
    elif attrs["reduction"] == "add":
        outs[0].scatter_add_(axis, at, updates)
    else:
        outs[0].scatter_reduce_(axis, at, updates, REDUCTIONS[attrs["reduction"]], include_self=True)


def grid_sample(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    """Torch calls the linear mode over three dims bilinear too."""
    mode = {"linear": "bilinear", "cubic": "bicubic", "nearest": "nearest"}[attrs["mode"]]
    outs[0].copy_(functional.grid_sample(ins[0], ins[1], mode, attrs["padding"], attrs["align_corners"]))


def top_k(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    """A stable sort: of equal values ONNX asks for the lower index, and torch.topk promises nothing."""
    axis = attrs["axis"]
    values, positions = torch.sort(ins[0], dim=axis, descending=attrs["largest"], stable=True)
    outs[0].copy_(values.narrow(axis, 0, attrs["k"]))
    outs[1].copy_(positions.narrow(axis, 0, attrs["k"]))


def _wrap(indices: torch.Tensor, size: int) -> torch.Tensor:
    return torch.where(indices < 0, indices + size, indices)


def _flat_positions(indices: torch.Tensor, sizes: torch.Size) -> torch.Tensor:
    """[…, depth] indices into axes of `sizes` → […] positions in those axes flattened, int64.

    Raises:
        IndexError: an index is out of range; flattened, it would silently hit another row.
    """
    limits = torch.tensor(list(sizes), dtype=torch.int64)
    wrapped = torch.where(indices < 0, indices + limits, indices.long())
    if bool(((wrapped < 0) | (wrapped >= limits)).any()):
        raise IndexError(f"an index is out of range for axes of sizes {list(sizes)}")
    strides = torch.tensor([math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))], dtype=torch.int64)
    return (wrapped * strides).sum(-1)


KERNELS: dict[Kind, Kernel] = {
    Kind.Gather: each_time(gather),
    Kind.GatherElements: each_time(gather_elements),
    Kind.GatherND: each_time(gather_nd),
    Kind.ScatterND: each_time(scatter_nd),
    Kind.ScatterElements: each_time(scatter_elements),
    Kind.GridSample: each_time(grid_sample),
    Kind.TopK: each_time(top_k),
}
