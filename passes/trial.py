"""Try a step on a model: pin, run, unpin, look at what came out. Nothing here decides what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from onnx import ValueInfoProto

from passes.base import Composite, Step, Workbench
from passes.canonical import canonical_digest
from passes.catalog import DESTROYS
from passes.errors import StepFailed
from passes.external.onnxsim import STAGES
from passes.narrow import culprits
from passes.numbers import Errors
from passes.pins import pin, unpin
from passes.prove import Measurement, Prover
from passes.provenance import carry
from passes.reads import live_nodes
from passes.watch import Lost, Watched
from passes.weights import DetachedModel

__all__ = ["Attempt", "Narrowed", "Trial"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a step made. `why` says what is wrong with it and is empty for a sound result; `lost` holds every structure
    that went, also those that were only observed."""

    model: DetachedModel
    changed: bool
    lost: Lost
    measurement: Measurement | None
    why: str

    @property
    def errors(self) -> Mapping[str, Errors]:
        return self.measurement.errors if self.measurement else {}

    @property
    def nodes(self) -> int:
        return len(self.model.proto.graph.node)


@dataclass(frozen=True, slots=True)
class Narrowed:
    """A composite step without the inner passes at fault, and what it makes then.

    `authors` maps each structure that was lost on the way to the step, or inner pass, that broke it.
    """

    step: Step
    attempt: Attempt
    taken_out: tuple[str, ...]
    authors: Mapping[tuple[str, str], str]


@dataclass(slots=True)
class Trial:
    """Tries steps on one model; `gone` are the structures that it has lost already."""

    model: DetachedModel
    gone: Lost
    watched: Watched
    prover: Prover
    bench: Workbench
    digest: str = ""

    def attempt(self, step: Step) -> Attempt:
        """Run `step` with the kept structures pinned, and judge the result by structure and by numbers.

        A pin costs what a pass could have done across it. So where pins a little further on exist, the step runs once
        more with those on what it made, and that counts if it is sound and smaller.

        Raises:
            StepFailed: the step raised, crashed, timed out, or changed the model's inputs or outputs.
        """
        first = self._judged(step, self.model, self.watched.pins(self.model))
        loose = [] if first.why else self.watched.loose_pins(first.model)
        if not loose:
            return first
        try:
            second = self._judged(step, first.model, loose)
        except StepFailed:
            return first
        return second if not second.why and _size(second) < _size(first) else first

    def _judged(self, step: Step, model: DetachedModel, pins: Sequence[ValueInfoProto]) -> Attempt:
        outputs = [output.name for output in model.proto.graph.output]
        after = unpin(step.apply(pin(model, pins), self.bench), outputs)
        _same_signature(self.model, after)
        self.digest = self.digest or canonical_digest(self.model)
        if canonical_digest(after) == self.digest:
            return Attempt(self.model, False, {}, None, "")
        after = carry(model, after, step.name)
        lost = {key: why for key, why in self.watched.lost(after).items() if key not in self.gone}
        broken = [f"{kind} {name}: {why}" for (kind, name), why in lost.items() if kind in self.watched.enforced]
        if broken:
            return Attempt(after, True, lost, None, _several("breaks", broken))
        measurement = self.prover.measure(after)
        return Attempt(after, True, lost, measurement, measurement.why and f"differs: {measurement.why}")

    def narrowed(self, step: Step, attempt: Attempt) -> Narrowed:
        """Find the inner passes that are at fault for `attempt`.

        Those that broke what must hold are taken out; those that only broke what is observed are named.
        """
        if not isinstance(step, Composite):
            return Narrowed(step, attempt, (), dict.fromkeys(attempt.lost, step.name))
        tried: dict[tuple[str, ...], Attempt] = {(): attempt}

        def without(names: tuple[str, ...]) -> Attempt:
            key = tuple(sorted(names))
            if key not in tried:
                try:
                    tried[key] = self.attempt(step.without(names))
                except StepFailed as failure:
                    tried[key] = Attempt(self.model, False, {}, None, str(failure))
            return tried[key]

        def is_good(names: tuple[str, ...]) -> bool:
            result = without(names)
            return not result.why and (bool(attempt.why) or not result.lost)

        kinds = {kind for kind, _ in attempt.lost}
        suspects = [name for name, destroyed in DESTROYS.items() if kinds & set(destroyed)]
        found = culprits(step.inner(self.bench), suspects or list(STAGES), is_good)
        if found is None:
            return Narrowed(step, attempt, (), dict.fromkeys(attempt.lost, step.name))
        authors = dict.fromkeys(attempt.lost, f"{step.name}/{_doer(found, attempt, without)}")
        if not attempt.why:
            return Narrowed(step, attempt, (), authors)
        sound = without(found)
        # What is only observed may still be lost; it is named, and stays lost.
        observed = self.narrowed(step.without(found), sound).authors if sound.lost else {}
        return Narrowed(step.without(found), sound, found, {**authors, **observed})


def _size(attempt: Attempt) -> int:
    return len(live_nodes(attempt.model.proto.graph))


def _doer(found: tuple[str, ...], attempt: Attempt, without: Callable[[tuple[str, ...]], Attempt]) -> str:
    """Of several culprits the one that did it: when all others are left out, the very same model comes out."""
    for name in found:
        others = tuple(other for other in found if other != name)
        if others and canonical_digest(without(others).model) == canonical_digest(attempt.model):
            return name
    return found[0]


def _same_signature(before: DetachedModel, after: DetachedModel) -> None:
    stored = {tensor.name for tensor in before.proto.graph.initializer}
    for what in ("input", "output"):
        had = [info.name for info in getattr(before.proto.graph, what) if info.name not in stored]
        has = [info.name for info in getattr(after.proto.graph, what) if info.name not in stored]
        if has != had:
            raise StepFailed(f"changes the model's {what}s from {had} to {has}")


def _several(verb: str, items: Sequence[str]) -> str:
    return f"{verb} {items[0]}" + (f" (and {len(items) - 1} more)" if len(items) > 1 else "")
