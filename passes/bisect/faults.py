"""What a bisection looks for: a structure that is lost, a step that breaks down, numbers that leave a tolerance."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Self

import numpy as np

from passes.bisect.replay import Made
from passes.context import PassContext
from passes.diff import match_models
from passes.errors import ModelError, PolicyError, StepFailed
from passes.graph.op_facts import RANDOM_OPS
from passes.model.canonical import meanings_of
from passes.optimize import plan_draws
from passes.policy.policy import unknown_structure
from passes.proof.client import choose_in_worker
from passes.proof.numbers import compare
from passes.run.reproduce import is_same_failure
from passes.structures import Instance, structure_of
from passes.weights.detached import DetachedModel
from passes.weights.sharing import MappedModel, portable

__all__ = ["Breakdown", "Deviation", "Fault", "Loss", "Run", "Sighting", "outputs"]


Run = Callable[[DetachedModel], Made]
"""Runs one step."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """The fault, as a model or a failure shows it: `lost` are structures, `error` is the largest at an output."""

    why: str
    lost: tuple[str, ...] = ()
    error: float | None = None


class Fault(ABC):
    """What is looked for. It knows the source model, which does not show it."""

    __slots__ = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The structures that it is about, for which some passes are known."""
        return ()

    @property
    @abstractmethod
    def description(self) -> str:
        """What is looked for, in words."""

    @property
    @abstractmethod
    def not_found_message(self) -> str:
        """What is right where the fault is nowhere."""

    @abstractmethod
    def observe(self, made: Made) -> Sighting | None:
        """How what steps have made of the source shows it; None if it does not."""

    @abstractmethod
    def reproduces(self, part: DetachedModel, run: Run) -> bool:
        """Whether the step that `run` runs shows it on `part`, which may be any model."""

    def measure(self, model: DetachedModel) -> float | None:
        """How far `model` is from the source, if that is what this is about."""
        return None

    def of_one_step(self, before: DetachedModel, made: Made) -> Self:
        """What of it a single step shows, which has made this of `before`."""
        return self

    def place(self, before: DetachedModel, made: Made) -> Collection[str]:
        """Values at which it is first seen; none if that is not known."""
        return ()


@dataclass(frozen=True, slots=True)
class Loss(Fault):
    """A structure of `kind` is there no more."""

    kind: str
    instances: tuple[Instance, ...]
    first: Instance | None = None
    """The one to look for where the finder does not see the structure in the model that it is lost from."""

    @classmethod
    def of(cls, kind: str, source: DetachedModel) -> Self:
        """Every instance in `source`.

        Raises:
            PolicyError: there is no such kind, or the model has none; with what it has instead.
        """
        structure = structure_of(kind)
        if structure is None:
            raise PolicyError(f"--lost: {unknown_structure(kind)}")
        found = structure.find(source)
        if not found.instances:
            raise PolicyError(
                f"--lost: {kind} matches nothing in this model, which has {found.instead}; "
                "so no pass can lose it: ask for what is there"
            )
        return cls(kind, found.instances)

    @property
    def kinds(self) -> tuple[str, ...]:
        return (self.kind,)

    @property
    def not_found_message(self) -> str:
        count = len(self.instances)
        return f"nothing lost: {f'all {count} {self.kind} stand' if count > 1 else f'the one {self.kind} stands'}"

    @property
    def description(self) -> str:
        return f"lost {self.kind}"

    def observe(self, made: Made) -> Sighting | None:
        lost = {} if made.failure else self._find_lost(self.instances, made.model)
        if not lost:
            return None
        names = tuple(lost)
        return Sighting(f"{self.kind} {names[0]}: {lost[names[0]]}", names)

    def of_one_step(self, before: DetachedModel, made: Made) -> Self:
        if self.reproduces(before, lambda _: made):
            return self
        lost = self._find_lost(self.instances, made.model)
        return replace(self, first=next((one for one in self.instances if one.name in lost), None))

    def place(self, before: DetachedModel, made: Made) -> Collection[str]:
        instances = self._instances_in(before)
        lost = self._find_lost(instances, made.model)
        first = next((one for one in instances if one.name in lost), None)
        if first is None:
            return ()
        return [pin.name for pin in first.pins] + ([first.core.value] if first.core else [])

    def reproduces(self, part: DetachedModel, run: Run) -> bool:
        instances = self._instances_in(part)
        if not instances:
            return False
        made = run(part)
        return not made.failure and made.model is not part and bool(self._find_lost(instances, made.model))

    def _instances_in(self, part: DetachedModel) -> Sequence[Instance]:
        """What may be lost from `part`."""
        if self.first is not None:
            return [] if self._find_lost([self.first], part) else [self.first]
        structure = structure_of(self.kind)
        return structure.find(part).instances if structure is not None else []

    def _find_lost(self, instances: Sequence[Instance], model: DetachedModel) -> dict[str, str]:
        structure = structure_of(self.kind)
        return structure.lost(instances, model) if structure is not None and instances else {}


@dataclass(frozen=True, slots=True)
class Breakdown(Fault):
    """A step crashes, runs past its time, raises, or returns something that is no such model."""

    status: str = ""
    """How it ended, once that is known."""

    @property
    def not_found_message(self) -> str:
        return "nothing crashes"

    @property
    def description(self) -> str:
        return "crash"

    def observe(self, made: Made) -> Sighting | None:
        if made.failure is None:
            return None
        said = " ".join(str(made.failure).split()) or type(made.failure).__name__
        return Sighting(f"{made.failure.status.replace('_', ' ')}: {said}")

    def of_one_step(self, before: DetachedModel, made: Made) -> Self:
        return self if made.failure is None else replace(self, status=made.failure.status)

    def reproduces(self, part: DetachedModel, run: Run) -> bool:
        made = run(part)
        return made.failure is not None and is_same_failure(made.failure.status, self.status)


Feeds = Sequence[Mapping[str, np.ndarray]]
Outputs = Sequence[Mapping[str, np.ndarray]]
"""By draw, then by name."""


@dataclass(frozen=True, slots=True)
class Distance:
    """The largest absolute error, in words too; infinite where a model does not run, which is `refused`."""

    error: float
    why: str = ""
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Deviation(Fault):
    """Some output is further than `tolerance` from what the source model computes, on seeded draws, in onnxruntime with
    graph optimization off. A model that does not run any more is infinitely far."""

    tolerance: float
    bench: PassContext
    feeds: Feeds
    expected: Outputs
    refused: bool = False
    """Whether what is looked for is that a model does not run."""
    known: dict[str, Distance] = field(default_factory=dict, compare=False)
    """By what a model computes, as a digest."""

    @classmethod
    def of(cls, tolerance: float, source: DetachedModel, bench: PassContext) -> Self:
        """With the draws of `passes.optimize`.

        Raises:
            ModelError: the model does not run, computes NaN, or is random: then it cannot be judged.
        """
        feeds, expected = _reference(source, bench)
        nan = [name for draw in expected for name, value in draw.items() if value.dtype.kind == "f" and _has_nan(value)]
        if nan:
            raise ModelError(f"the model's own output {nan[0]!r} holds NaN, so nothing can be compared with it")
        if any(node.op_type in RANDOM_OPS for node in source.proto.graph.node):
            twice = _outputs(source, [*feeds, *feeds], bench)  # a new session would draw the same numbers again
            apart = _distance(twice[: len(feeds)], twice[len(feeds) :])
            if apart.error > tolerance:
                raise ModelError(
                    f"the model is random: two runs of it differ by {apart.error:.3g}, over {tolerance:g}, so no pass "
                    "can be blamed for that"
                )
        return cls(tolerance, bench, feeds, expected)

    @property
    def not_found_message(self) -> str:
        worst = max((one.error for one in self.known.values()), default=0.0)
        return f"nothing wrong: outputs are off by at most {worst:.3g}, and {self.tolerance:g} is allowed"

    @property
    def description(self) -> str:
        return f"error over {self.tolerance:g}"

    def observe(self, made: Made) -> Sighting | None:
        if made.failure:
            return None
        found = self._distance(made.model)
        return Sighting(found.why, (), found.error) if found.error > self.tolerance else None

    def measure(self, model: DetachedModel) -> float:
        return self._distance(model).error

    def _distance(self, model: DetachedModel) -> Distance:
        meaning = meanings_of(model).whole
        if meaning not in self.known:
            try:
                self.known[meaning] = _distance(self.expected, _outputs(model, self.feeds, self.bench))
            except StepFailed as failure:
                self.known[meaning] = Distance(math.inf, " ".join(str(failure).split()), refused=True)
        return self.known[meaning]

    def of_one_step(self, before: DetachedModel, made: Made) -> Self:
        """The error may have grown over several steps; then half of what this one adds is looked for."""
        if self._distance(made.model).refused:
            return replace(self, refused=True)
        apart = _distance(_outputs(before, self.feeds, self.bench), _outputs(made.model, self.feeds, self.bench)).error
        return self if apart > self.tolerance else replace(self, tolerance=apart / 2)

    def place(self, before: DetachedModel, made: Made) -> Collection[str]:
        """What the nodes make that went or were changed first."""
        matched = match_models(before, made.model)
        items = matched.same.before.items
        first = next((olds for olds, _ in matched.groups if olds), ())
        return [name for old in first for name in items[old].node.output]

    def reproduces(self, part: DetachedModel, run: Run) -> bool:
        made = run(part)
        if made.failure or made.model is part:
            return False
        try:
            feeds, expected = _reference(part, self.bench)
        except (ModelError, StepFailed):  # no model that can be judged
            return False
        try:
            got = _outputs(made.model, feeds, self.bench)
        except StepFailed:
            return self.refused
        if self.refused or any(map(_has_nan, (value for draw in expected for value in draw.values()))):
            return False
        return _distance(expected, got).error > self.tolerance


def outputs(model: MappedModel, feeds: Feeds) -> Outputs:
    """In the proof worker: what `model` computes from each of `feeds`.

    Raises:
        StepFailed: onnxruntime refuses the model, or stops.
    """
    session = model.session()
    return [session.run(draw) for draw in feeds]


def _outputs(model: DetachedModel, feeds: Feeds, bench: PassContext) -> Outputs:
    return bench.proofs.ask(OUTPUTS, model=portable(model, bench.spill), feeds=list(feeds))


def _reference(source: DetachedModel, bench: PassContext) -> tuple[Feeds, Outputs]:
    try:
        draws, _ = choose_in_worker(source, plan_draws(source), bench)
    except StepFailed as failure:
        raise ModelError(f"the model does not run as it is: {failure}") from failure
    return [draw.feeds for draw in draws], [draw.results for draw in draws]


def _distance(expected: Outputs, got: Outputs) -> Distance:
    """The largest absolute error of all outputs, and where it is."""
    worst = Distance(0.0)
    for draw, other in zip(expected, got, strict=True):
        for name, value in draw.items():
            errors = compare(value, other[name])
            if errors.max_abs > worst.error:
                said = f"is off by {errors.max_abs:.3g}" if math.isfinite(errors.max_abs) else errors.why
                worst = Distance(errors.max_abs, f"output {name}: {said}")
    return worst


def _has_nan(value: np.ndarray) -> bool:
    return value.dtype.kind == "f" and bool(np.isnan(value).any())


OUTPUTS: Final = "passes.bisect.faults:outputs"
