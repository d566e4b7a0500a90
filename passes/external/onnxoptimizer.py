"""onnxoptimizer: one of its passes a step, on the detached model, since none of them computes with weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import onnx

from passes.errors import StepFailed
from passes.external.numbered import name_again, number, quote_own_names
from passes.external.onnxoptimizer_search import Change
from passes.step import Workbench
from passes.weights.detached import DetachedModel
from passes.worker.client import Worker

__all__ = ["OnnxOptimizerPass", "OnnxOptimizerPasses", "available", "default_set", "passes_of"]

NAME: Final = "onnxoptimizer"

REMEMBERED: Final = 4

SEARCH: Final = "onnxoptimizer, search"

CHANGES: Final = "passes.external.onnxoptimizer_search:changes"
TOGETHER: Final = "passes.external.onnxoptimizer_search:made_together"


@dataclass(frozen=True, slots=True)
class OnnxOptimizerPass:
    """Run one named pass of onnxoptimizer once.

    `ahead` names the passes that are likely to be next. The worker goes on with them, each alone, from what the ones
    before have made; most change nothing, and their turn then costs nothing.
    """

    name: str
    ahead: tuple[str, ...] = field(default=(), compare=False)
    source: str = field(default=NAME, init=False)

    def apply(self, model: DetachedModel, bench: Workbench) -> DetachedModel:
        """A new model, or the very same object when the pass changes nothing."""
        known = _known(bench, model.proto)
        if self.name not in known.idle and self.name not in known.made:
            self._try(known, bench)
        if self.name in known.idle:
            return model
        return _named(known.made[self.name], model)

    def begin(self, model: DetachedModel, bench: Workbench) -> None:
        """Try this pass and those ahead on `model`, without waiting."""
        _searched(_known(bench, model.proto).source, [self.name, *self.ahead], bench)

    def foreseen(self, model: DetachedModel, bench: Workbench) -> DetachedModel | None:
        """What the last of these passes that changes anything makes; None as long as the worker is not at the end."""
        search = _searched(_known(bench, model.proto).source, [self.name, *self.ahead], bench)
        found = search.all_changes(bench.worker)
        return model.with_proto(onnx.load_from_string(found[-1].model)) if found else None

    def looking_past(self, names: Collection[str]) -> OnnxOptimizerPass:
        """The same pass, which leaves out `names` when it looks ahead."""
        return replace(self, ahead=tuple(name for name in self.ahead if name not in names))

    def _try(self, known: _Known, bench: Workbench) -> None:
        """Find out what this pass makes of the model, and which of those ahead do nothing."""
        ahead = [name for name in self.ahead if name not in known.idle] if known.may_look_ahead else []
        names = [self.name, *ahead]
        try:
            search = _searched(known.source, names, bench)
            change = search.next_change(bench.worker)
        except StepFailed as failure:
            if not ahead:
                failure.args = (quote_own_names(str(failure), known.proto.graph.node),)
                raise
            known.may_look_ahead = False  # one that is not asked for yet may be at fault
            self._try(known, bench)
            return
        if change is None:
            known.idle.update(names)
            return
        place = change.place - search.begun
        known.idle.update(names[:place])
        known.made[names[place]] = change
        bench.notes[SEARCH] = replace(search, source=change.model, names=names[place + 1 :], begun=change.place + 1)


@dataclass(frozen=True, slots=True)
class OnnxOptimizerPasses:
    """Run several named passes in one call of the library, which reads and writes the model once."""

    names: tuple[str, ...]
    source: str = field(default=NAME, init=False)

    @property
    def name(self) -> str:
        return ", ".join(self.names)

    def apply(self, model: DetachedModel, bench: Workbench) -> DetachedModel:
        """A new model, or the very same object when the passes change nothing."""
        try:
            change: Change | None = bench.worker.call(TOGETHER, model=_numbered(model.proto), names=self.names)
        except StepFailed as failure:
            failure.args = (quote_own_names(str(failure), model.proto.graph.node),)
            raise
        return model if change is None else _named(change, model)


def _named(change: Change, source: DetachedModel) -> DetachedModel:
    """What the library made of `source`, its nodes called as they were."""
    made = onnx.load_from_string(change.model)
    name_again(made, change.names, source.proto.graph.node)
    return source.with_proto(made)


@dataclass(frozen=True, slots=True)
class _Search:
    """What the worker is at: it runs `names`, of which `begun` are done, on `source`."""

    source: bytes
    names: Sequence[str]
    ticket: int
    begun: int = 0
    arrived: deque[Change | StepFailed | None] = field(default_factory=deque)
    """What the worker has told, and nobody has asked for yet; None is its end."""

    def next_change(self, worker: Worker) -> Change | None:
        """Raises StepFailed: a pass did."""
        found = self.arrived.popleft() if self.arrived else self._collected(worker)
        if isinstance(found, StepFailed):
            raise found
        return found

    def all_changes(self, worker: Worker) -> list[Change]:
        """Those that are still to come; empty as long as the worker is not at the end, or if it did not get there."""
        while worker.has_answered(self.ticket):
            self.arrived.append(self._collected(worker))
        is_at_end = bool(self.arrived) and self.arrived[-1] is None
        return [one for one in self.arrived if isinstance(one, Change)] if is_at_end else []

    def goes_on(self, worker: Worker) -> bool:
        return bool(self.arrived) or worker.awaits(self.ticket)

    def _collected(self, worker: Worker) -> Change | StepFailed | None:
        try:
            return worker.collect(self.ticket)
        except StepFailed as failure:
            return failure


def _searched(source: bytes, names: Sequence[str], bench: Workbench) -> _Search:
    """The search that is under way, if it is this one, or a new one."""
    search: _Search | None = bench.notes.get(SEARCH)
    if search is None or (search.source, search.names) != (source, names) or not search.goes_on(bench.worker):
        search = _Search(source, names, bench.worker.post(CHANGES, model=source, names=names))
        bench.notes[SEARCH] = search
    return search


@dataclass(slots=True)
class _Known:
    """What is known of a model: the passes that leave it as it is, and what others make of it."""

    proto: onnx.ModelProto
    source: bytes
    idle: set[str] = field(default_factory=set)
    made: dict[str, Change] = field(default_factory=dict)
    may_look_ahead: bool = True


def _known(bench: Workbench, proto: onnx.ModelProto) -> _Known:
    """A model is known again by identity; a few are remembered, since steps are tried with different pins."""
    remembered: list[_Known] = bench.notes.setdefault(NAME, [])
    found = next((known for known in remembered if known.proto is proto), None) or _Known(proto, _numbered(proto))
    remembered[:] = [*(known for known in remembered if known is not found), found][-REMEMBERED:]
    return found


def _numbered(proto: onnx.ModelProto) -> bytes:
    """The model with numbered nodes: what they are called is no part of what the worker goes on from."""
    numbered = onnx.ModelProto()
    numbered.CopyFrom(proto)
    number(numbered)
    return numbered.SerializeToString()


def passes_of(names: Sequence[str]) -> tuple[OnnxOptimizerPass, ...]:
    """Steps for `names`, each with those behind it as `ahead`."""
    return tuple(OnnxOptimizerPass(name, tuple(names[index + 1 :])) for index, name in enumerate(names))


def available() -> tuple[str, ...]:
    """Every pass of the installed release."""
    import onnxoptimizer

    return tuple(onnxoptimizer.get_available_passes())


def default_set() -> tuple[str, ...]:
    """The fuse-and-eliminate set that `default` stands for, in the library's order."""
    import onnxoptimizer

    return tuple(onnxoptimizer.get_fuse_and_elimination_passes())
