"""Find runs of layers in a module that look equal; `proof` then checks that they also make equal calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pipeline.importers.from_torch.modules import STANDARD

TRACED = 2
"""Units that are traced: the first, which reads what precedes the run, and the second, which reads another unit."""

LONGEST_PERIOD = 8
"""The most layers that a repeated pattern may have: Gemma 3 repeats five sliding layers and a full one."""


@dataclass(frozen=True, slots=True)
class LayerRun:
    """`count` equal units of `period` layers each, in the list at `path`, from the layer `first` on.

    `siblings` are further lists, whose layers of the same numbers belong to the same units: `self.norms[i]`.
    """

    path: str
    first: int
    period: int
    count: int
    siblings: tuple[str, ...] = ()
    led: bool = False
    """Whether the first unit includes the calls before its first layer, because another layer precedes it."""

    @property
    def saved(self) -> int:
        """Layers that need no trace."""
        return (self.count - TRACED) * self.period

    @property
    def is_inside(self) -> bool:
        """Whether its list is in a layer of another list."""
        return any(name.isdigit() for name in self.path.split("."))

    @property
    def numbers(self) -> range:
        """The indices of all its layers in the list."""
        return range(self.first, self.first + self.count * self.period)

    @property
    def offsets(self) -> range:
        """The offsets of the layers in a unit, list by list."""
        return range(self.period * (1 + len(self.siblings)))

    def join(self, others: Sequence[LayerRun]) -> LayerRun | None:
        """One run over this list and those of `others`, for the layer numbers they share; None if it saves nothing."""
        first = max(run.first for run in (self, *others))
        count = min(run.numbers.stop for run in (self, *others)) - first
        if count <= TRACED or any(run.period != 1 for run in (self, *others)):
            return None
        return LayerRun(self.path, first, 1, count, tuple(run.path for run in others))

    def alternatives(self) -> Iterator[LayerRun]:
        """Other ways to divide the same layers into units, in the order in which to try them.

        First without the first layer, which may prepare something for all, or without the last one; then in larger
        units, since every second layer may do something else. Each also with `led`.
        """
        for run in self._parts():
            if run != self:
                yield run
            if run.first > 0:
                yield replace(run, led=True)

    def _parts(self) -> Iterator[LayerRun]:
        yield self
        for first, count in ((1, self.count - 1), (0, self.count - 1), (1, self.count - 2)):
            if count > TRACED:
                yield replace(self, first=self.first + first * self.period, count=count)
        for period in range(2 * self.period, LONGEST_PERIOD + 1, self.period):
            count = len(self.numbers) // period
            if count > TRACED:
                yield replace(self, first=self.numbers.stop - count * period, period=period, count=count)

    def layer(self, unit: int, offset: int, rest: str = "") -> str:
        """The module path of a layer, followed by `rest`: `.mlp.weight`."""
        place, offset = divmod(offset, self.period)
        return f"{self._prefixes[place]}{self.first + unit * self.period + offset}{rest}"

    def locate(self, name: str) -> tuple[int, int, str] | None:
        """(unit, offset, rest) of a module or a parameter of the run; None for what is not in it."""
        for place, prefix in enumerate(self._prefixes):
            if not name.startswith(prefix):
                continue
            number, dot, rest = name[len(prefix) :].partition(".")
            if number.isdigit():
                unit, offset = divmod(int(number) - self.first, self.period)
                return (unit, offset + place * self.period, dot + rest) if 0 <= unit < self.count else None
        return None

    @property
    def _prefixes(self) -> tuple[str, ...]:
        return tuple([f"{path}." if path else "" for path in (self.path, *self.siblings)])


def runs_in(module: nn.Module) -> list[LayerRun]:
    """The runs that save a trace, the longest first; none overlaps another."""
    runs = [run for found in _by_list(module, "") for run in _disjoint(found)]
    return sorted(runs, key=lambda run: -run.saved)


def _by_list(module: nn.Module, path: str) -> Iterator[list[LayerRun]]:
    """The runs of each list. A list inside the layers of another list (the experts of each layer) counts only if those
    layers form no run."""
    if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > TRACED:
        runs = _runs_of(path, list(module))
        if runs:
            yield runs
            return
    for name, child in module.named_children():
        yield from _by_list(child, f"{path}.{name}" if path else name)


def _disjoint(runs: list[LayerRun]) -> Iterator[LayerRun]:
    """Runs of one list that do not overlap: the longest, then the longest of the rest, and so on."""
    taken: set[int] = set()
    for run in sorted(runs, key=lambda run: (-run.saved, run.period)):
        if taken.isdisjoint(run.numbers):
            taken.update(run.numbers)
            yield run


def _runs_of(path: str, layers: list[nn.Module]) -> list[LayerRun]:
    known: dict[Any, int] = {}
    looks = [_look(layer, known) for layer in layers]
    return [run for period in range(1, LONGEST_PERIOD + 1) for run in _runs(path, looks, period) if run.saved > 0]


def _runs(path: str, looks: list[int], period: int) -> Iterator[LayerRun]:
    """Stretches in which each layer looks like the one a period before. A remainder is left out at the beginning."""
    start = 0
    for index in range(period, len(looks) + 1):
        if index == len(looks) or looks[index] != looks[index - period]:
            count = (index - start) // period
            yield LayerRun(path, index - count * period, period, count)
            start = index - period + 1


def _look(module: nn.Module, known: dict[Any, int]) -> int:
    """Number what a module looks like: its class, tensors, plain attributes and children.

    Integers are left out, since one of them is the index of the layer.
    """
    held = vars(module)
    attributes = () if held.keys() == STANDARD else sorted(held.keys() - STANDARD)
    look = (
        type(module),
        module.training,
        _specs(module._parameters),
        _specs(module._buffers),
        frozenset(module._non_persistent_buffers_set),
        tuple([(key, held[key]) for key in attributes if type(held[key]) in PLAIN]),
        tuple([(name, child and _look(child, known)) for name, child in module._modules.items()]),
    )
    return known.setdefault(look, len(known))


def _specs(tensors: Mapping[str, torch.Tensor | None]) -> tuple[Any, ...]:
    return tuple([(name, _spec(tensor)) for name, tensor in tensors.items()]) if tensors else ()


def _spec(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


PLAIN = frozenset({bool, float, str, type(None), torch.dtype})


class NotRepeatable(Exception):
    """Layers cannot be repeated; the message is the reason, without a full stop."""
