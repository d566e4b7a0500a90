"""Products of matrices as one call of torch's BLAS over views."""

from __future__ import annotations

import math
from functools import partial

import torch

from pipeline.runtime.kernels.base import Launch, OverloadCall


def multiply_matrices(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> Launch:
    """One product of matrices, with a bias for each column."""
    return partial(torch.mm, a, b, out=out) if bias is None else partial(torch.addmm, bias, a, b, out=out)


def multiply_batches(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, batch: torch.Size) -> Launch | None:
    """As a single mm or bmm over views, which torch.matmul derives at each call; None where strides need a copy."""
    (rows, inner), columns = a.shape[-2:], b.shape[-1]
    count = math.prod(batch)
    try:
        if b.dim() == 2:
            return multiply_matrices(a.view(count * rows, inner), b, None, out.view(count * rows, columns))
        many_a = a.expand(*batch, rows, inner).view(count, rows, inner)
        many_b = b.expand(*batch, inner, columns).view(count, inner, columns)
        return partial(torch.bmm, many_a, many_b, out=out.view(count, rows, columns))
    except RuntimeError:
        return None


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> Launch:
    """`x @ weight + bias` with a matrix on the right and a bias for each column, as one product where strides allow."""
    try:
        rows, result = x.view(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    except RuntimeError:
        return partial(_multiply_rows, x, weight, bias, out)
    return multiply_matrices(rows, weight, bias, result)


def multiply_and_activate(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor, activation: str
) -> Launch | None:
    """Product, bias and activation as one call of cuBLASLt; None for an activation that its epilogue does not have, or
    where strides need a copy. On CUDA the GELU of `_addmm_activation` is that by tanh."""
    if activation not in ("relu", "gelu_tanh") or not (x.is_contiguous() and out.is_contiguous()):
        return None
    rows, result = x.view(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    epilogue = torch.ops.aten._addmm_activation.out
    return OverloadCall.bind(epilogue, bias, rows, weight, use_gelu=activation == "gelu_tanh", out=result)


def _multiply_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    torch.matmul(x, weight, out=out)
    if bias is not None:
        out.add_(bias)


def flatten_rows(tensor: torch.Tensor, kept: int) -> torch.Tensor | None:
    """All axes but the last `kept` as one; None where that takes a copy."""
    if tensor.dim() <= kept or not tensor.numel():
        return None
    try:
        return tensor.view(-1, *tensor.shape[tensor.dim() - kept :])
    except RuntimeError:
        return None
