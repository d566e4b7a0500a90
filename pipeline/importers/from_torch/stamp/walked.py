"""A model that was run without numbers, and the shortened one that is traced in its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from pipeline.importers.from_torch.stamp.call import Call
from pipeline.importers.from_torch.stamp.proof import Proof, alike_around
from pipeline.importers.from_torch.stamp.record import Event
from pipeline.importers.from_torch.stamp.run import TRACED, Run
from pipeline.importers.from_torch.stamp.shorten import shortened
from pipeline.importers.from_torch.stamp.unsuited import Unsuited
from pipeline.importers.from_torch.stamp.walk import Walk, walk

__all__ = ["Walked", "short_of", "walked"]


@dataclass(frozen=True, slots=True)
class Walked:
    """A module, its call, and what happened in it."""

    module: nn.Module
    call: Call
    walk: Walk


def walked(module: nn.Module, call: Call, runs: Sequence[Run]) -> Walked:
    """Run it; the layers of `runs` are watched.

    Raises:
        Unsuited: it cannot run without numbers.
    """
    return Walked(module, call, walk(module, call, _layers(module, runs)))


def short_of(run: Run, others: Sequence[Run], whole: Walked, proof: Proof) -> Walked:
    """The first shortened model that does around its layers what the whole one does around all of its own.

    The layers of `others` are watched too: this model is the whole one of theirs.

    Raises:
        Unsuited: there is none.
    """
    parts = [whole.call]
    if spare := _spare(run, whole, proof):
        parts.append(whole.call.without(spare))
    reasons: list[Unsuited] = []
    for counts in (False, True):
        for part in parts:
            try:
                return _tried(run, others, whole, proof, part, counts)
            except Unsuited as reason:
                reasons.append(reason)
    raise reasons[0]


def _tried(run: Run, others: Sequence[Run], whole: Walked, proof: Proof, part: Call, counts: bool) -> Walked:
    try:
        module = shortened(whole.module, run, counts=counts)
    except Exception as error:
        raise Unsuited(f"no copy of it can be made: {type(error).__name__}: {error}") from error
    try:
        found = walked(module, part, (replace(run, count=TRACED), *others))
    except Unsuited as reason:
        raise Unsuited(f"with {TRACED * run.period} layers in place of {run.count * run.period} {reason}") from reason
    alike_around(run, whole.walk, found.walk, proof)
    return found


def _spare(run: Run, whole: Walked, proof: Proof) -> set[int]:
    """Keys of inputs that only units without a trace read, and that the call can be made without."""
    later = range(proof.frames[TRACED - 1][1].start, proof.frames[-1][1].stop)
    events = whole.walk.events
    inside = _inputs_of(events[later.start : later.stop])
    around = _inputs_of((*events[: later.start], *events[later.stop :]))
    return whole.call.spare(whole.module).keys() & (inside - around)


def _inputs_of(events: Sequence[Event]) -> set[int]:
    return {ref[1] for event in events for ref in event.refs if ref[0] == "given"}


def _layers(module: nn.Module, runs: Sequence[Run]) -> dict[str, nn.Module]:
    paths = [run.layer(unit, offset) for run in runs for unit in range(run.count) for offset in run.offsets]
    layers = {path: module.get_submodule(path) for path in paths}
    inside = [child for item in layers.items() for child in _called(*item)]
    return layers | dict(inside)


def _called(path: str, layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a layer that is a list or a dict, which nobody can call."""
    if isinstance(layer, nn.ModuleList | nn.ModuleDict):
        for name, child in layer.named_children():
            yield f"{path}.{name}", child
            yield from _called(f"{path}.{name}", child)
