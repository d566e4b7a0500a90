"""Matrix products, and the recurrent kinds: products in a loop over time."""

from __future__ import annotations

import math
from functools import partial

import torch

from pipeline.lowering import Kind
from pipeline.runtime.kernels.base import Attrs, Ins, Kernel, Launch, Outs, each_time

__all__ = ["KERNELS"]

BACKWARDS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


def matmul(ins: Ins, outs: Outs, _: Attrs) -> Launch:
    """A vector is a row on the left and a column on the right, as in numpy; torch's out= is unreliable for vectors."""
    (a, b), out = ins, outs[0]
    if b.dim() == 1:
        b, out = b.unsqueeze(1), out.unsqueeze(-1)
    if a.dim() == 1:
        a, out = a.unsqueeze(0), out.unsqueeze(-2)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if out.shape != (*batch, a.shape[-2], b.shape[-1]) or a.shape[-1] != b.shape[-2]:
        raise RuntimeError(f"the product of {list(a.shape)} and {list(b.shape)} is not {list(out.shape)}")
    return _one_product(a, b, out, batch) or partial(torch.matmul, a, b, out=out)


def _one_product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, batch: torch.Size) -> Launch | None:
    """As a single mm or bmm over views, which torch.matmul derives at each call; None where strides need a copy."""
    (rows, inner), columns = a.shape[-2:], b.shape[-1]
    count = math.prod(batch)
    try:
        if b.dim() == 2:
            return partial(torch.mm, a.view(count * rows, inner), b, out=out.view(count * rows, columns))
        many_a = a.expand(*batch, rows, inner).view(count, rows, inner)
        many_b = b.expand(*batch, inner, columns).view(count, inner, columns)
        return partial(torch.bmm, many_a, many_b, out=out.view(count, rows, columns))
    except RuntimeError:
        return None


def gemm(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    """alpha · op(a) @ op(b) + beta · c, where c broadcasts to the product."""
    a = ins[0].t() if attrs["trans_a"] else ins[0]
    b = ins[1].t() if attrs["trans_b"] else ins[1]
    alpha, beta = _scalar(attrs["alpha"], outs[0]), _scalar(attrs["beta"], outs[0])
    if len(ins) == 3:
        return partial(torch.addmm, ins[2], a, b, alpha=alpha, beta=beta, out=outs[0])
    product = partial(torch.mm, a, b, out=outs[0])
    return product if alpha == 1 else partial(_scale_after, product, outs[0], alpha)


def _scale_after(product: Launch, out: torch.Tensor, factor: float) -> None:
    product()
    out.mul_(factor)


def einsum(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    outs[0].copy_(torch.einsum(attrs["equation"], *ins))


def _scalar(value: float, like: torch.Tensor) -> float | int:
    """Torch takes no float factor for integer matrices; an integer product has a whole one."""
    return value if like.is_floating_point() else int(value)


def lstm(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    """Gates in ONNX's order: input, output, forget, cell. B holds the bias of the input, then that of the state."""
    x, weights, recurrences, biases, first_hidden, first_cell = ins
    every, last_hidden, last_cell = outs
    for index, backwards in enumerate(BACKWARDS[attrs["direction"]]):
        recurrence, bias = recurrences[index].T, biases[index].reshape(2, -1).sum(0)
        of_input = torch.matmul(x, weights[index].T) + bias
        hidden, cell = first_hidden[index], first_cell[index]
        for step in reversed(range(len(x))) if backwards else range(len(x)):
            gates = torch.addmm(of_input[step], hidden, recurrence)
            enter, leave, forget, candidate = gates.chunk(4, dim=1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(candidate)
            hidden = torch.sigmoid(leave) * torch.tanh(cell)
            every[step, index] = hidden
        last_hidden[index], last_cell[index] = hidden, cell


KERNELS: dict[Kind, Kernel] = {
    Kind.MatMul: matmul,
    Kind.Gemm: gemm,
    Kind.Einsum: each_time(einsum),
    Kind.LSTM: each_time(lstm),
}
