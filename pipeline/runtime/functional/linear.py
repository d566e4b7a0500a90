"""Matrix products, and the plain LSTM."""

from __future__ import annotations

import torch

from pipeline.ops import Kind
from pipeline.runtime.functional.base import Attrs, Form, Ins, Specs, only


def gemm(ins: Ins, attrs: Attrs, outs: Specs) -> torch.Tensor:
    """alpha · op(a) @ op(b) + beta · c; the factors of integers are whole."""
    a = ins[0].t() if attrs["trans_a"] else ins[0]
    b = ins[1].t() if attrs["trans_b"] else ins[1]
    number = float if outs[0].dtype.startswith(("float", "bfloat")) else int
    alpha, beta = number(attrs["alpha"]), number(attrs["beta"])
    if len(ins) == 3:
        return torch.addmm(ins[2], a, b, alpha=alpha, beta=beta)
    product = a @ b
    return product if alpha == 1 else product * alpha


def einsum(ins: Ins, attrs: Attrs, _: Specs) -> torch.Tensor:
    return torch.einsum(attrs["equation"], *ins).clone()


def lstm(ins: Ins, attrs: Attrs, _: Specs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gates in ONNX's order: input, output, forget, cell."""
    runs = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[attrs["direction"]]
    found = [_one_direction(ins, place, backwards) for place, backwards in enumerate(runs)]
    every, hidden, cell = zip(*found, strict=True)
    return torch.stack(every, 1), torch.stack(hidden), torch.stack(cell)


def _one_direction(ins: Ins, place: int, backwards: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, of_input, of_state, bias, hidden, cell = ins[0], *(tensor[place] for tensor in ins[1:])
    size = hidden.shape[-1]
    steps = range(x.shape[0])
    made = {}
    for step in reversed(steps) if backwards else steps:
        gates = x[step] @ of_input.t() + hidden @ of_state.t() + bias[: 4 * size] + bias[4 * size :]
        enter, leave, forget, candidate = (gates[:, at * size : (at + 1) * size] for at in range(4))
        cell = forget.sigmoid() * cell + enter.sigmoid() * candidate.tanh()
        hidden = leave.sigmoid() * cell.tanh()
        made[step] = hidden
    return torch.stack([made[step] for step in steps]), hidden, cell


FORMS: dict[Kind, Form] = {
    Kind.MatMul: only(torch.matmul),
    Kind.Gemm: gemm,
    Kind.Einsum: einsum,
    Kind.LSTM: lstm,
}
