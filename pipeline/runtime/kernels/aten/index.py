"""Quick ways of operators that pick elements by indices, or change some of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pipeline.runtime.kernels.aten.call import Call, Quick, into
from pipeline.runtime.kernels.base import Launch, Outs

__all__ = ["QUICK"]


def embedding(call: Call, outs: Outs) -> Launch | None:
    """Rows of the table, picked into the result at once, as torch itself picks them."""
    table, indices = call.args[:2]
    if not (indices.is_contiguous() and outs[0].is_contiguous() and outs[0].numel() and table.dim() == 2):
        return None
    return partial(torch.index_select, table, 0, indices.view(-1), out=outs[0].view(-1, table.shape[1]))


def changed(in_place: Callable[..., Any]) -> Quick:
    """By torch's own writing in place, where the plan put the result on the operand; else as any operator."""

    def quick(call: Call, outs: Outs) -> Launch | None:
        operand, *rest = call.args
        return partial(in_place, outs[0], *rest, **call.kwargs) if _lies_on(outs[0], operand) else None

    return quick


def replaced(part_of: Callable[..., torch.Tensor]) -> Quick:
    """A part of the operand becomes the second argument; the other arguments say which part."""

    def quick(call: Call, outs: Outs) -> Launch:
        operand, new, *rest = call.args
        part = part_of(outs[0], *rest, **call.kwargs)
        if _lies_on(outs[0], operand):
            return partial(part.copy_, new)
        return partial(_copy_and_replace, outs[0], operand, part, new)

    return quick


def overwritten(in_place: Callable[..., Any]) -> Quick:
    """Of the operand's elements none is left, so it does not matter where the result lies."""

    def quick(call: Call, outs: Outs) -> Launch:
        return partial(in_place, outs[0], *call.args[1:], **call.kwargs)

    return quick


def _lies_on(out: torch.Tensor, operand: torch.Tensor) -> bool:
    return out.data_ptr() == operand.data_ptr() and out.stride() == operand.stride() and out.shape == operand.shape


def _copy_and_replace(out: torch.Tensor, operand: torch.Tensor, part: torch.Tensor, new: torch.Tensor) -> None:
    out.copy_(operand)
    part.copy_(new)


QUICK: dict[str, Quick] = {
    "aten.copy.default": overwritten(torch.Tensor.copy_),
    "aten.embedding.default": embedding,
    "aten.fill.Scalar": overwritten(torch.Tensor.fill_),
    "aten.fill.Tensor": overwritten(torch.Tensor.fill_),
    "aten.gather.default": into(torch.gather),
    "aten.index_add.default": changed(torch.Tensor.index_add_),
    "aten.index_copy.default": changed(torch.Tensor.index_copy_),
    "aten.index_fill.int_Scalar": changed(torch.Tensor.index_fill_),
    "aten.index_fill.int_Tensor": changed(torch.Tensor.index_fill_),
    "aten.index_put.default": changed(torch.ops.aten.index_put_.default),  # that of torch.Tensor takes no None
    "aten.index_select.default": into(torch.index_select),
    "aten.masked_fill.Tensor": changed(torch.Tensor.masked_fill_),
    "aten.masked_scatter.default": changed(torch.Tensor.masked_scatter_),
    "aten.scatter.src": changed(torch.Tensor.scatter_),
    "aten.scatter.value": changed(torch.Tensor.scatter_),
    "aten.scatter_add.default": changed(torch.Tensor.scatter_add_),
    "aten.select_scatter.default": replaced(torch.ops.aten.select.int),
    "aten.slice_scatter.default": replaced(torch.ops.aten.slice.Tensor),
    "aten.zero.default": overwritten(torch.Tensor.zero_),
}
