"""Layers of ONNX that torch has no operator for: recurrent cells with all that ONNX gives them, RoiAlign, TopK.

They are written in torch's own operators, which torch follows to trace and to differentiate them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn import functional

from pipeline.errors import Unsupported

Squash = Callable[[torch.Tensor], torch.Tensor]
States = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One direction of a cell: what its steps read except the input, whose product is taken for all steps at once."""

    of_state: torch.Tensor
    """The weights of the state, transposed: [hidden, gates · hidden]."""
    bias: torch.Tensor
    """That of the state."""
    peepholes: torch.Tensor | None
    squashes: Sequence[Squash]
    flag: bool
    """`input_forget` of an LSTM, `linear_before_reset` of a GRU."""


def recurrent(
    input: torch.Tensor,
    w: torch.Tensor,
    r: torch.Tensor,
    b: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    peepholes: torch.Tensor | None = None,
    *,
    kind: str,
    direction: str = "forward",
    activations: str = "",
    alphas: Sequence[float] | None = None,
    betas: Sequence[float] | None = None,
    clip: float = 0.0,
    input_forget: bool = False,
    reset_after: bool = False,
) -> list[torch.Tensor]:
    """An LSTM, a GRU or an RNN as ONNX defines it: all hidden states [steps, directions, batch, hidden], then the last.

    `w`, `r` and `b` are ONNX's W, R and B; no `activations` are the usual ones. Steps are taken in the order of time,
    or against it, by all sequences at once: one that has not begun or has ended keeps its state, and gives 0.
    """
    steps, size, states = range(input.shape[0]), r.shape[-1], [hidden] if cell is None else [hidden, cell]
    names = activations.split(",") if activations else [*USUAL[kind]] * w.shape[0]
    every, last = [], []
    for place, backwards in enumerate(BACKWARDS[direction]):
        count = len(USUAL[kind])
        chosen = range(place * count, (place + 1) * count)
        limits = [clip if at - chosen.start < 2 else 0.0 for at in chosen]  # an LSTM's last one takes the cell's state
        squashes = [
            squash_by(names[at], alphas[at] if alphas else 0.0, betas[at] if betas else 0.0, limit)
            for at, limit in zip(chosen, limits, strict=True)
        ]
        to_input, to_state = b[place].chunk(2)
        gates = functional.linear(input, w[place], to_input)
        peeps = None if peepholes is None else peepholes[place]
        one = Cell(r[place].t(), to_state, peeps, squashes, input_forget if kind == "LSTM" else reset_after)
        now: States = tuple(state[place] for state in states)
        made: dict[int, torch.Tensor] = {}
        for step in reversed(steps) if backwards else steps:
            after = CELLS[kind](gates[step], now, one, size)
            if lengths is not None:
                inside = (lengths > step).unsqueeze(1)
                after = tuple(torch.where(inside, new, old) for new, old in zip(after, now, strict=True))
                made[step] = torch.where(inside, after[0], 0)
            else:
                made[step] = after[0]
            now = after
        every.append(torch.stack([made[step] for step in steps]))
        last.append(now)
    return [torch.stack(every, 1), *(torch.stack(ends) for ends in zip(*last, strict=True))]


def lstm_step(x: torch.Tensor, states: States, cell: Cell, size: int) -> States:
    """Gates in ONNX's order: input, output, forget, cell; peepholes: input, output, forget."""
    (hidden, kept), (gate, squash, last) = states, cell.squashes
    enter, leave, forget, candidate = (torch.addmm(x, hidden, cell.of_state) + cell.bias).split(size, 1)
    sees = None if cell.peepholes is None else cell.peepholes.split(size)
    if sees is not None:
        enter, forget = enter + sees[0] * kept, forget + sees[2] * kept
    enter = gate(enter)
    kept = (1 - enter if cell.flag else gate(forget)) * kept + enter * squash(candidate)
    if sees is not None:
        leave = leave + sees[1] * kept
    return gate(leave) * last(kept), kept


def gru_step(x: torch.Tensor, states: States, cell: Cell, size: int) -> States:
    """Gates in ONNX's order: update, reset, hidden. The reset is applied before the product, or after it."""
    (hidden,), (gate, squash) = states, cell.squashes
    of_gates, of_new = cell.of_state.split([2 * size, size], 1)
    update, reset = gate(torch.addmm(x[:, : 2 * size], hidden, of_gates) + cell.bias[: 2 * size]).split(size, 1)
    new, bias = x[:, 2 * size :], cell.bias[2 * size :]
    new = new + reset * (hidden @ of_new + bias) if cell.flag else torch.addmm(new, reset * hidden, of_new) + bias
    return (torch.lerp(squash(new), hidden, update),)


def rnn_step(x: torch.Tensor, states: States, cell: Cell, size: int) -> States:
    del size
    return (cell.squashes[0](torch.addmm(x, states[0], cell.of_state) + cell.bias),)


def squash_by(name: str, alpha: float, beta: float, limit: float) -> Squash:
    """An activation with its parameters; above 0, `limit` clips what it takes."""
    function = ACTIVATIONS[name]
    return lambda x: function(x.clamp(-limit, limit) if limit > 0 else x, alpha, beta)


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
"""By name, with their parameters alpha and beta."""

CELLS = {"LSTM": lstm_step, "GRU": gru_step, "RNN": rnn_step}
USUAL = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
BACKWARDS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


def roi_align(
    input: torch.Tensor,
    boxes: torch.Tensor,
    places: torch.Tensor,
    output_size: Sequence[int],
    mode: str = "avg",
    half_pixel: bool = True,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> torch.Tensor:
    """Each cell of a region is the mean, or the largest share, of bilinear samples in it.

    `places` says of each box, in which picture it is. Without a `sampling_ratio` a box has so many samples as it has
    pixels, so the corners of the boxes are read.

    Raises:
        Unsupported: it is traced, and the boxes have no values.
    """
    rows, columns = output_size
    offset = 0.5 if half_pixel else 0.0
    regions = [input.new_zeros((0, input.shape[1], rows, columns))]
    for (left, top, right, bottom), place in read_boxes(boxes.double() * spatial_scale - offset, places):
        width, height = right - left, bottom - top
        if not half_pixel:
            width, height = max(width, 1.0), max(height, 1.0)
        down = sampling_ratio or max(math.ceil(height / rows), 1)
        across = sampling_ratio or max(math.ceil(width / columns), 1)
        y = sample_places(top, height / rows, rows, down)
        x = sample_places(left, width / columns, columns, across)
        cells = sample(input[place], y, x).reshape(4, -1, rows, down, columns, across)
        regions.append((cells.sum(0).mean((2, 4)) if mode == "avg" else cells.amax(0).amax((2, 4))).unsqueeze(0))
    return torch.cat(regions)


def read_boxes(boxes: torch.Tensor, places: torch.Tensor) -> list[tuple[list[float], int]]:
    """The corners of each box, and in which picture it is."""
    try:
        return list(zip(boxes.tolist(), places.tolist(), strict=True))
    except (DataDependentOutputException, GuardOnDataDependentSymNode) as error:
        raise Unsupported(
            "RoiAlign takes as many samples as its boxes have pixels, and a trace has no boxes yet, so no recorded "
            "step or traced program holds it: leave it out of what is recorded, and compute it in a call of its own"
        ) from error


def top_k(self: torch.Tensor, k: int, dim: int, largest: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` largest or smallest elements along an axis, in order, and their places (int64). ONNX's TopK.

    Of equal elements the one with the lower index comes first, which torch.topk does not promise.
    """
    values, places = torch.sort(self, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k), places.narrow(dim, 0, k)


def sample_places(begin: float, size: float, count: int, samples: int) -> torch.Tensor:
    """The places of `samples` samples in each of `count` cells."""
    return begin + size * (torch.arange(count * samples, dtype=torch.float64) + 0.5) / samples


def sample(picture: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The four weighted neighbours [4, channels, len(y), len(x)]; 0 for a place more than 1 outside of the picture."""
    height, width = picture.shape[1:]
    (top, bottom, y_share), (left, right, x_share) = neighbours(y, height), neighbours(x, width)
    inside = ((y >= -1) & (y <= height)).unsqueeze(1) & ((x >= -1) & (x <= width)).unsqueeze(0)
    corners = []
    for rows, by_row in ((top, 1 - y_share), (bottom, y_share)):
        for columns, by_column in ((left, 1 - x_share), (right, x_share)):
            share = (by_row.unsqueeze(1) * by_column.unsqueeze(0) * inside).to(picture.dtype)
            corners.append(picture[:, rows][:, :, columns] * share)
    return torch.stack(corners)


def neighbours(places: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The elements before and after each place, and the share of the element after it."""
    places = places.clamp(0, size - 1)
    low = places.long()
    return low, (low + 1).clamp(max=size - 1), places - low
