"""Quick ways of matrix products: flattened once, when the call is bound, where strides can say it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from pipeline.runtime.kernels.aten.call import Call, Quick, into
from pipeline.runtime.kernels.aten.written import made
from pipeline.runtime.kernels.base import Launch, Outs

__all__ = ["QUICK"]

nn: Any = vars(torch._C)["_nn"]  # its stubs leave this module out

ONE_MATRIX = 2
"""Axes of a matrix."""


def linear(call: Call, outs: Outs) -> Launch | None:
    """One product of matrices, with the bias in it, as torch does it for rows that lie one after the other."""
    x, weight = call.args[:2]
    bias = call.given.get("bias")
    rows, out = _flat(x, 1), _flat(outs[0], 1)
    if rows is None or out is None or weight.dim() != ONE_MATRIX:
        return made(nn.linear)(call, outs)
    if bias is None:
        return partial(torch.mm, rows, weight.t(), out=out)
    return partial(torch.addmm, bias, rows, weight.t(), out=out)


def matmul(call: Call, outs: Outs) -> Launch | None:
    """As one product of matrices, or as one for each place of the batch."""
    a, b = call.args
    if b.dim() == ONE_MATRIX and a.dim() >= ONE_MATRIX:
        rows, out = _flat(a, 1), _flat(outs[0], 1)
        return None if rows is None or out is None else partial(torch.mm, rows, b, out=out)
    if a.dim() != b.dim() or a.dim() <= ONE_MATRIX or a.shape[:-2] != b.shape[:-2]:
        return None
    left, right, out = _flat(a, 2), _flat(b, 2), _flat(outs[0], 2)
    return None if left is None or right is None or out is None else partial(torch.bmm, left, right, out=out)


def _flat(tensor: torch.Tensor, kept: int) -> torch.Tensor | None:
    """All axes but the last `kept` as one; None where that takes a copy."""
    if tensor.dim() <= kept or not tensor.numel():
        return None
    try:
        return tensor.view(-1, *tensor.shape[tensor.dim() - kept :])
    except RuntimeError:
        return None


QUICK: dict[str, Quick] = {
    "aten.linear.default": linear,
    "aten.matmul.default": matmul,
    "aten.mm.default": into(torch.mm),
    "aten.bmm.default": into(torch.bmm),
    "aten.addmm.default": into(torch.addmm),
    "aten.baddbmm.default": into(torch.baddbmm),
    "aten.scaled_dot_product_attention.default": made(nn.scaled_dot_product_attention),
    "aten.conv1d.default": made(torch.conv1d),
    "aten.conv2d.default": made(torch.conv2d),
    "aten.conv3d.default": made(torch.conv3d),
}
