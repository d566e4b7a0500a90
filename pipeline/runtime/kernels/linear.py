"""Matrix products, and the recurrent kinds: products in a loop over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from pipeline.ir.graph import TensorSpec
from pipeline.ops import Kind
from pipeline.runtime.kernels.base import Attrs, Ins, Kernel, Launch, Outs, each_time
from pipeline.runtime.kernels.packing import Packer, Stored, pack_product
from pipeline.runtime.kernels.weight_forms import ProductWeight

BACKWARDS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


def matmul(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    """A vector is a row on the left and a column on the right, as in numpy; torch's out= is unreliable for vectors."""
    (a, b), out = ins, outs[0]
    packed = attrs.get("packed")
    launch = packed.launch_product(a, None, out) if packed else None
    if launch is not None:
        return launch
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


def pack_matmul(attrs: Attrs, specs: Sequence[TensorSpec], stored: Stored) -> ProductWeight | None:
    """Where the right side is a stored matrix and the left side has rows."""
    weight = stored.get(1)
    if weight is None or weight.dim() != 2 or specs[0].rank < 2:
        return None
    return pack_product(specs[0].numel // max(specs[0].sizes[-1], 1), weight.t(), native=attrs.get("native"))


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> Launch:
    """`x @ weight + bias` with a matrix on the right and a bias for each column, as one product where strides allow."""
    try:
        rows, result = x.view(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    except RuntimeError:
        return partial(_multiply_rows, x, weight, bias, out)
    if bias is None:
        return partial(torch.mm, rows, weight, out=result)
    return partial(torch.addmm, bias, rows, weight, out=result)


def _multiply_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    torch.matmul(x, weight, out=out)
    if bias is not None:
        out.add_(bias)


def gemm(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    """alpha · op(a) @ op(b) + beta · c, where c broadcasts to the product."""
    packed = attrs.get("packed")
    bias = ins[2].view(-1) if packed and len(ins) == 3 else None
    launch = packed.launch_product(ins[0], bias, outs[0]) if packed else None
    if launch is not None:
        return launch
    a = ins[0].t() if attrs["trans_a"] else ins[0]
    b = ins[1].t() if attrs["trans_b"] else ins[1]
    alpha, beta = _scalar(attrs["alpha"], outs[0]), _scalar(attrs["beta"], outs[0])
    if len(ins) == 3:
        return partial(torch.addmm, ins[2], a, b, alpha=alpha, beta=beta, out=outs[0])
    product = partial(torch.mm, a, b, out=outs[0])
    return product if alpha == 1 else partial(_scale_after, product, outs[0], alpha)


def pack_gemm(attrs: Attrs, specs: Sequence[TensorSpec], stored: Stored) -> ProductWeight | None:
    """Where nothing is scaled, and c has one number for each column."""
    weight = stored.get(1)
    if weight is None or attrs["trans_a"] or attrs["alpha"] != 1:
        return None
    weight = weight if attrs["trans_b"] else weight.t()
    if len(specs) == 3 and (attrs["beta"] != 1 or specs[2].sizes not in ((len(weight),), (1, len(weight)))):
        return None
    return pack_product(specs[0].sizes[0], weight, native=attrs.get("native"))


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

PACKERS: dict[Kind, Packer] = {Kind.MatMul: pack_matmul, Kind.Gemm: pack_gemm}
