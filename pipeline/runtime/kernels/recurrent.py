"""Recurrent kernels: a loop over time in torch."""

from __future__ import annotations

import torch

from pipeline.lowering import Kind
from pipeline.runtime.kernels.base import Attrs, Ins, Kernel, Outs, each_time

__all__ = ["KERNELS"]

BACKWARDS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


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


KERNELS: dict[Kind, Kernel] = {Kind.LSTM: each_time(lstm)}
