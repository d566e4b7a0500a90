"""Recurrent cells, one step after the other. A sequence that has ended keeps its state, and its results are 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from pipeline.ops import Kind
from pipeline.runtime.kernels.base import Attrs, Ins, Kernel, Outs, each_time

BACKWARDS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
COUNTS = {"LSTM": 3, "GRU": 2, "RNN": 1}

States = tuple[torch.Tensor, ...]
Activation = Callable[[torch.Tensor], torch.Tensor]
Activations = Sequence[Activation]


def plain_lstm(ins: Ins, outs: Outs, attrs: Attrs) -> None:
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


def recurrent(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    """x, W, R, B, the lengths, the states and for an LSTM the peepholes → all hidden states, and the last states."""
    x, weights, recurrences, biases, lengths, *rest = ins
    every, *last = outs
    states, peepholes = (rest[:2], rest[2]) if attrs["cell"] == "LSTM" else (rest, None)
    steps, longest = len(x), lengths.long()
    for index, backwards in enumerate(BACKWARDS[attrs["direction"]]):
        step = CELLS[attrs["cell"]](
            recurrences[index],
            biases[index],
            None if peepholes is None else peepholes[index],
            activations_of(attrs, index),
            attrs,
        )
        of_input = torch.matmul(x, weights[index].T)
        now: States = tuple(state[index] for state in states)
        for place in range(steps):
            # Each sequence is read from its own end, so its step `place` comes from another row.
            inside = (place < longest).unsqueeze(1)
            rows = (longest - 1 - place).clamp(min=0) if backwards else torch.full_like(longest, place)
            after = step(clip(of_input[rows, torch.arange(len(rows))], 0.0), now)
            now = tuple(torch.where(inside, new, old) for new, old in zip(after, now, strict=True))
            result = torch.where(inside, now[0], torch.zeros_like(now[0]))
            if backwards:
                live = inside.squeeze(1)
                every[rows[live], index, torch.arange(len(rows))[live]] = result[live]
                ended = ~live
                every[place, index, torch.arange(len(rows))[ended]] = 0
            else:
                every[place, index] = result
        for out, state in zip(last, now, strict=True):
            out[index] = state


Step = Callable[[torch.Tensor, States], States]


def lstm_step(
    recurrence: torch.Tensor, bias: torch.Tensor, peepholes: torch.Tensor | None, act: Activations, attrs: Attrs
) -> Step:
    """Gates in ONNX's order: input, output, forget, cell; peepholes are those of input, output and forget."""
    both = bias.reshape(2, -1).sum(0)
    assert peepholes is not None
    peep_in, peep_out, peep_forget = peepholes.reshape(3, -1)
    gate, squash, shape = act

    def step(x: torch.Tensor, states: States) -> States:
        hidden, cell = states
        enter, leave, forget, candidate = (x + hidden @ recurrence.T + both).chunk(4, dim=1)
        enter = gate(clip(enter + peep_in * cell, attrs["clip"]))
        forget = 1 - enter if attrs["input_forget"] else gate(clip(forget + peep_forget * cell, attrs["clip"]))
        new = forget * cell + enter * squash(clip(candidate, attrs["clip"]))
        return gate(clip(leave + peep_out * new, attrs["clip"])) * shape(new), new

    return step


def gru_step(
    recurrence: torch.Tensor, bias: torch.Tensor, _: torch.Tensor | None, act: Activations, attrs: Attrs
) -> Step:
    """Gates in ONNX's order: update, reset, hidden. The reset is applied before the product, or after it."""
    of_x, of_h = bias.reshape(2, -1)
    size = recurrence.shape[1]
    gate, squash = act
    inner, rest = recurrence[: 2 * size].T, recurrence[2 * size :].T

    def step(x: torch.Tensor, states: States) -> States:
        (hidden,) = states
        gates = x[:, : 2 * size] + hidden @ inner + of_x[: 2 * size] + of_h[: 2 * size]
        update, reset = (gate(clip(part, attrs["clip"])) for part in gates.chunk(2, dim=1))
        if attrs["reset_after"]:
            product = reset * (hidden @ rest + of_h[2 * size :])
        else:
            product = (reset * hidden) @ rest + of_h[2 * size :]
        new = squash(clip(x[:, 2 * size :] + of_x[2 * size :] + product, attrs["clip"]))
        return ((1 - update) * new + update * hidden,)

    return step


def rnn_step(
    recurrence: torch.Tensor, bias: torch.Tensor, _: torch.Tensor | None, act: Activations, attrs: Attrs
) -> Step:
    both = bias.reshape(2, -1).sum(0)

    def step(x: torch.Tensor, states: States) -> States:
        return (act[0](clip(x + states[0] @ recurrence.T + both, attrs["clip"])),)

    return step


def clip(x: torch.Tensor, limit: float) -> torch.Tensor:
    return x.clamp(-limit, limit) if limit > 0 else x


def activations_of(attrs: Attrs, direction: int) -> list[Activation]:
    """The activations of a direction, with their numbers."""
    count = COUNTS[attrs["cell"]]
    chosen = slice(direction * count, (direction + 1) * count)
    rows = zip(attrs["activations"].split(",")[chosen], attrs["alphas"][chosen], attrs["betas"][chosen], strict=True)
    return [partial(ACTIVATIONS[name], alpha=alpha, beta=beta) for name, alpha, beta in rows]


def plain(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An activation without numbers."""

    def activation(x: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
        del alpha, beta
        return function(x)

    return activation


def affine(x: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
    return alpha * x + beta


def elu(x: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
    del beta
    return functional.elu(x, alpha)


def hard_sigmoid(x: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
    return (alpha * x + beta).clamp(0, 1)


def leaky_relu(x: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
    del beta
    return torch.where(x < 0, alpha * x, x)


def scaled_tanh(x: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
    return alpha * torch.tanh(beta * x)


def thresholded_relu(x: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
    del beta
    return torch.where(x > alpha, x, torch.zeros_like(x))


ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "Affine": affine,
    "Elu": elu,
    "HardSigmoid": hard_sigmoid,
    "LeakyRelu": leaky_relu,
    "Relu": plain(torch.relu),
    "ScaledTanh": scaled_tanh,
    "Sigmoid": plain(torch.sigmoid),
    "Softplus": plain(functional.softplus),
    "Softsign": plain(functional.softsign),
    "Tanh": plain(torch.tanh),
    "ThresholdedRelu": thresholded_relu,
}

CELLS: dict[str, Callable[[torch.Tensor, torch.Tensor, Any, Activations, Attrs], Step]] = {
    "LSTM": lstm_step,
    "GRU": gru_step,
    "RNN": rnn_step,
}

KERNELS: dict[Kind, Kernel] = {Kind.LSTM: each_time(plain_lstm), Kind.Recurrent: each_time(recurrent)}
