"""Recurrent cells: with lengths, peepholes, clipping and activations of choice.

Steps are taken in the order of time, or against it, by all sequences at once. One that has not begun or has ended keeps
its state, and its results are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn import functional

from pipeline.ops import Kind
from pipeline.runtime.functional.base import Attrs, Form, Ins, Specs

Squash = Callable[[torch.Tensor], torch.Tensor]
States = Sequence[torch.Tensor]


def plain_lstm(ins: Ins, attrs: Attrs, _: Specs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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


def recurrent(ins: Ins, attrs: Attrs, _: Specs) -> list[torch.Tensor]:
    """x, W, R, B, lengths, the states and an LSTM's peepholes → all hidden states, and the last states."""
    x, lengths = ins[0], ins[4]
    cell, steps = CELLS[attrs["cell"]], range(ins[0].shape[0])
    count = 2 if attrs["cell"] == "LSTM" else 1
    runs = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[attrs["direction"]]
    every, last = [], []
    for place, backwards in enumerate(runs):
        weights = [ins[at][place] for at in (1, 2, 3)] + [tensor[place] for tensor in ins[5 + count :]]
        squashes = _squashes(attrs, place, len(runs))
        states: States = [state[place] for state in ins[5 : 5 + count]]
        made = {}
        for step in reversed(steps) if backwards else steps:
            inside = (lengths > step).unsqueeze(1)
            new = cell(x[step], states, weights, squashes, attrs)
            states = [torch.where(inside, after, before) for after, before in zip(new, states, strict=True)]
            made[step] = states[0] * inside
        every.append(torch.stack([made[step] for step in steps]))
        last.append(states)
    return [torch.stack(every, 1), *(torch.stack(ends) for ends in zip(*last, strict=True))]


def lstm(x: torch.Tensor, states: States, weights: Ins, squashes: Sequence[Squash], attrs: Attrs) -> States:
    """Gates in ONNX's order: input, output, forget, cell; peepholes: input, output, forget."""
    of_input, of_state, bias, peepholes = weights
    (hidden, cell), (gate, squash, last) = states, squashes
    size = hidden.shape[-1]
    gates = functional.linear(x, of_input, bias[: 4 * size]) + functional.linear(hidden, of_state, bias[4 * size :])
    enter, leave, forget, candidate = gates.split(size, 1)
    see_enter, see_leave, see_forget = peepholes.split(size)
    enter = gate(enter + see_enter * cell)
    kept = 1 - enter if attrs["input_forget"] else gate(forget + see_forget * cell)
    cell = kept * cell + enter * squash(candidate)
    return gate(leave + see_leave * cell) * last(cell), cell


def gru(x: torch.Tensor, states: States, weights: Ins, squashes: Sequence[Squash], attrs: Attrs) -> States:
    """Gates in ONNX's order: update, reset, hidden."""
    of_input, of_state, bias = weights
    (hidden,), (gate, squash) = states, squashes
    size = hidden.shape[-1]
    update, reset, new = functional.linear(x, of_input, bias[: 3 * size]).split(size, 1)
    of_update, of_reset, of_new = of_state.split(size)
    to_update, to_reset, to_new = bias[3 * size :].split(size)
    update = gate(update + functional.linear(hidden, of_update, to_update))
    reset = gate(reset + functional.linear(hidden, of_reset, to_reset))
    if attrs["reset_after"]:
        new = new + reset * functional.linear(hidden, of_new, to_new)
    else:
        new = new + functional.linear(reset * hidden, of_new, to_new)
    return (torch.lerp(squash(new), hidden, update),)


def rnn(x: torch.Tensor, states: States, weights: Ins, squashes: Sequence[Squash], _: Attrs) -> States:
    of_input, of_state, bias = weights
    to_input, to_state = bias.chunk(2)
    return (squashes[0](functional.linear(x, of_input, to_input) + functional.linear(states[0], of_state, to_state)),)


def _squashes(attrs: Attrs, place: int, directions: int) -> list[Squash]:
    """The activations of a direction. Each clips what it takes, except an LSTM's last, which takes the cell's state."""
    names = attrs["activations"].split(",")
    count = len(names) // directions
    chosen = range(place * count, (place + 1) * count)
    clips = [attrs["clip"] if at - chosen.start < 2 else 0.0 for at in chosen]
    return [
        _squash(names[at], attrs["alphas"][at], attrs["betas"][at], clip)
        for at, clip in zip(chosen, clips, strict=True)
    ]


def _squash(name: str, alpha: float, beta: float, clip: float) -> Squash:
    function = ACTIVATIONS[name]
    return lambda x: function(x.clamp(-clip, clip) if clip > 0 else x, alpha, beta)


ACTIVATIONS: Mapping[str, Callable[[torch.Tensor, float, float], torch.Tensor]] = {
    "Affine": lambda x, alpha, beta: x * alpha + beta,
    "Elu": lambda x, alpha, _: functional.elu(x, alpha),
    "HardSigmoid": lambda x, alpha, beta: functional.hardtanh(x * alpha + beta, 0.0, 1.0),
    "LeakyRelu": lambda x, alpha, _: functional.leaky_relu(x, alpha),
    "Relu": lambda x, _, __: functional.relu(x),
    "ScaledTanh": lambda x, alpha, beta: (x * beta).tanh() * alpha,
    "Sigmoid": lambda x, _, __: x.sigmoid(),
    "Softplus": lambda x, _, __: functional.softplus(x),
    "Softsign": lambda x, _, __: functional.softsign(x),
    "Tanh": lambda x, _, __: x.tanh(),
    "ThresholdedRelu": lambda x, alpha, _: functional.threshold(x, alpha, 0.0),
}
"""By name, with their numbers alpha and beta."""

CELLS = {"LSTM": lstm, "GRU": gru, "RNN": rnn}

FORMS: dict[Kind, Form] = {Kind.LSTM: plain_lstm, Kind.Recurrent: recurrent}
