"""Try a step on a model: pin, run, unpin, look at what came out. Nothing here decides what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from passes.base import Composite, Step, Workbench
from passes.canonical import canonical_digest
from passes.corner import corner_of
from passes.destroys import DESTROYS, merging
from passes.errors import StepFailed
from passes.external.onnxsim import STAGES
from passes.narrow import culprits
from passes.numbers import Errors
from passes.pins import pin, unpin
from passes.prove import Measurement, Prover
from passes.provenance import carry
from passes.reads import live_nodes
from passes.result import Status
from passes.validity import what_is_invalid
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
    status: Status = Status.REVERTED
    """What a step is called of which this attempt has to be thrown away."""

    @property
    def broke_down(self) -> bool:
        """Whether the worker died over it."""
        return self.status in (Status.CRASHED, Status.TIMED_OUT)

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


@dataclass
class Trial:
    """Tries steps on one model; `gone` are the structures that it has lost already."""

    model: DetachedModel
    gone: Lost
    watched: Watched
    prover: Prover
    bench: Workbench

    @cached_property
    def digest(self) -> str:
        return canonical_digest(self.model)

    @cached_property
    def is_invalid(self) -> bool:
        """Whether the model breaks ONNX's rules already, as sources do; then no step is blamed for it."""
        return bool(what_is_invalid(self.model))

    # The pinned models stay the same objects, by which steps may know them again.
    @cached_property
    def pinned(self) -> DetachedModel:
        return pin(self.model, self.watched.pins(self.model))

    @cached_property
    def loosely(self) -> DetachedModel | None:
        """The model with the pins to try second, where there are any."""
        return self._loosely(self.model)

    def _loosely(self, model: DetachedModel) -> DetachedModel | None:
        pins = self.watched.loose_pins(model)
        return pin(model, pins) if pins else None

    @cached_property
    def corner(self) -> DetachedModel | None:
        """What the second pins set free; one object for all models in which it is the same."""
        corner = corner_of(self.model, self.watched.pins(self.model), self.watched.loose_pins(self.model))
        if corner is None:
            return None
        known: dict[str, DetachedModel] = self.bench.notes.setdefault("corner", {})
        return known.setdefault(canonical_digest(corner), corner)

    def _gains_nothing(self, step: Step) -> bool:
        """Whether `step` is known to do the same with the second pins as with the first."""
        if self.corner is None:
            return False
        try:
            made = step.apply(self.corner, self.bench)
        except StepFailed:
            return False
        return made is self.corner or canonical_digest(made) == canonical_digest(self.corner)

    def tried(self, step: Step) -> Attempt:
        """`attempt`, with a step that fails as an attempt too."""
        try:
            return self.attempt(step)
        except StepFailed as failure:
            return Attempt(self.model, False, {}, None, str(failure), Status(failure.status))

    def attempt(self, step: Step) -> Attempt:
        """Run `step` with the kept structures pinned, and judge the result by structure and by numbers.

        A pin costs what a pass could have done across it. So where pins further on exist, and the step does something
        there, it runs once more with those on what it made, and that counts if it is sound and smaller.

        Raises:
            StepFailed: the step raised, crashed, timed out, or changed the model's inputs or outputs.
        """
        first = self._judged(step, self.pinned)
        if first.why or self.loosely is None or self._gains_nothing(step):
            return first
        for freer, pinned in self._with_more_room(step, first.model):
            again = self._again(freer, pinned)
            if again is not None and _size(again) < _size(first):
                return again
        return first

    def _with_more_room(self, step: Step, model: DetachedModel) -> Iterator[tuple[Step, DetachedModel]]:
        """What to try on `model`, which the step has made with the first pins.

        With wide pins a merging pass finds what it looks for, and what the others make of the model is lost with it. It
        has had its turn; so the ones that are known are left out.
        """
        wide = self.watched.wide_pins(model) if isinstance(step, Composite) else []
        if wide and isinstance(step, Composite):
            known = merging(self.watched.enforced)
            yield step.without([name for name in step.inner(self.bench) if name in known]), pin(model, wide)
        loose = self.loosely if model is self.model else self._loosely(model)
        if loose is not None:
            yield step, loose

    def _again(self, step: Step, pinned: DetachedModel) -> Attempt | None:
        """The attempt, if it is sound."""
        try:
            made = self._judged(step, pinned)
        except StepFailed:
            return None
        return None if made.why else made

    def _judged(self, step: Step, pinned: DetachedModel) -> Attempt:
        made = step.apply(pinned, self.bench)
        if made is pinned:
            return Attempt(self.model, False, {}, None, "")
        after = unpin(made, [output.name for output in self.model.proto.graph.output])
        _same_signature(self.model, after)
        if canonical_digest(after) == self.digest:
            return Attempt(self.model, False, {}, None, "")
        after = carry(pinned, after, step.name)
        lost = {key: why for key, why in self.watched.lost(after).items() if key not in self.gone}
        broken = [f"{kind} {name}: {why}" for (kind, name), why in lost.items() if kind in self.watched.enforced]
        if broken:
            return Attempt(after, True, lost, None, _several("breaks", broken))
        invalid = "" if self.is_invalid else what_is_invalid(after)
        if invalid:
            return Attempt(after, True, lost, None, f"makes a model that is not valid ONNX: {invalid}")
        measurement = self.prover.measure(after)
        return Attempt(after, True, lost, measurement, measurement.why and f"differs: {measurement.why}")

    def narrowed(self, step: Step, attempt: Attempt) -> Narrowed:
        """Find the inner passes that are at fault for `attempt`.

        Those that broke what must hold are taken out; those that only broke what is observed are named.
        """
        # To wait for many more time limits would cost more than the name is worth.
        if not isinstance(step, Composite) or attempt.status is Status.TIMED_OUT:
            return Narrowed(step, attempt, (), dict.fromkeys(attempt.lost, step.name))
        tried: dict[tuple[str, ...], Attempt] = {(): attempt}

        def without(names: tuple[str, ...]) -> Attempt:
            key = tuple(sorted(names))
            if key not in tried:
                tried[key] = self.tried(step.without(names))
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
