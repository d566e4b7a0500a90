"""Quick ways of operators that put tensors together."""

from __future__ import annotations

from functools import partial

import torch

from pipeline.errors import Unsupported
from pipeline.runtime.kernels.aten.call import Call, Quick, into
from pipeline.runtime.kernels.base import Launch, Outs

__all__ = ["QUICK"]


def as_strided(call: Call, outs: Outs) -> Launch:
    """Counted from the first element of the operand, which may lie anywhere in the arena."""
    x, sizes, strides = call.args[:3]
    offset = call.given.get("storage_offset") or 0
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if 0 not in sizes and last >= x.numel():
        raise Unsupported(
            f"as_strided({sizes}, {strides}, {offset}) leaves the {x.numel()} elements of its operand; a plan holds "
            "values, not storage: use slices in its place"
        )
    return partial(_strided_into, outs[0], x, sizes, strides, offset)


def _strided_into(out: torch.Tensor, x: torch.Tensor, sizes: list[int], strides: list[int], offset: int) -> None:
    rows = x.contiguous()
    out.copy_(rows.as_strided(sizes, strides, int(rows.storage_offset()) + offset))


QUICK: dict[str, Quick] = {
    "aten.as_strided.default": as_strided,
    "aten.cat.default": into(torch.cat),
    "aten.stack.default": into(torch.stack),
}
