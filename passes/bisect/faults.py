"""What a fault is that a bisection looks for, and a lost structure as such a fault."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Self

from passes.errors import PolicyError, StepFailed, check_type
from passes.policy.policy import unknown_structure
from passes.structures import Instance, structure_of
from passes.visible import visible_line
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of running a step on a model; a failure leaves the model as it was."""

    model: DetachedModel
    changed: bool = True
    failure: StepFailed | None = None


Run = Callable[[DetachedModel], StepOutcome]
"""Runs one step."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """How a model or a failure shows the fault: the structures `lost`, or the largest `error` at an output."""

    why: str
    lost: tuple[str, ...] = ()
    error: float | None = None


class Fault(ABC):
    """A fault to look for, relative to a source model that does not show it."""

    __slots__ = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of structure it concerns; for some kinds the passes that destroy them are known."""
        return ()

    @property
    @abstractmethod
    def description(self) -> str:
        """The fault in words."""

    @property
    @abstractmethod
    def not_found_message(self) -> str:
        """What to print when no step shows the fault."""

    @abstractmethod
    def observe(self, outcome: StepOutcome) -> Sighting | None:
        """How a result shows the fault.

        Args:
            outcome: what steps have made of the source.

        Returns:
            What is wrong with the result; None if it does not show the fault.
        """

    @abstractmethod
    def reproduces(self, part: DetachedModel, run: Run) -> bool:
        """Whether a step shows the fault on a part of a model.

        Args:
            part: any model, such as a few nodes of the source.
            run: runs the step on a model.
        """

    def measure(self, model: DetachedModel) -> float | None:
        """The error of a model against the source.

        Args:
            model: a model that steps have made of the source.

        Returns:
            The largest absolute error of an output; None for a fault that is not measured.
        """
        return None

    def of_one_step(self, before: DetachedModel, outcome: StepOutcome) -> Self:
        """The part of the fault that one step shows.

        Args:
            before: the model before the step.
            outcome: the result of the step on `before`.

        Returns:
            The fault to look for in parts of `before`.
        """
        return self

    def locate(self, before: DetachedModel, outcome: StepOutcome) -> Collection[str]:
        """Values at which the fault shows first.

        Args:
            before: the model before the step.
            outcome: the result of the step on `before`.

        Returns:
            Names of values in `before`; none if they are not known.
        """
        return ()


@dataclass(frozen=True, slots=True)
class Loss(Fault):
    """A structure of `kind` is gone; `instances` are those of the source."""

    kind: str
    instances: tuple[Instance, ...]
    first: Instance | None = None
    """The instance to look for where the finder does not recognize the structure just before the loss."""

    @classmethod
    def of(cls, kind: str, source: DetachedModel) -> Self:
        """The loss of any instance of one kind of structure in a model.

        Args:
            kind: the name of a structure, such as `qkv`.
            source: the model that the steps begin with.

        Raises:
            PolicyError: the kind is unknown, or the model has none; the message says what it has instead.
        """
        check_type(kind, str, "Loss.of", "the name of a structure, such as qkv")
        check_type(source, DetachedModel, "Loss.of", "a model that read_model has read")
        structure = structure_of(kind)
        if structure is None:
            raise PolicyError(f"--lost: {unknown_structure(kind)}")
        result = structure.find(source)
        if not result.instances:
            raise PolicyError(
                visible_line(f"--lost: {kind} matches nothing in this model, which has {result.instead}; ")
                + "so no pass can lose it: name a structure that the model has"
            )
        return cls(kind, result.instances)

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

    def observe(self, outcome: StepOutcome) -> Sighting | None:
        lost = {} if outcome.failure else self._find_lost(self.instances, outcome.model)
        if not lost:
            return None
        names = tuple(lost)
        return Sighting(f"{self.kind} {names[0]}: {lost[names[0]]}", names)

    def of_one_step(self, before: DetachedModel, outcome: StepOutcome) -> Self:
        if self.reproduces(before, lambda _: outcome):
            return self
        lost = self._find_lost(self.instances, outcome.model)
        return replace(self, first=next((instance for instance in self.instances if instance.name in lost), None))

    def locate(self, before: DetachedModel, outcome: StepOutcome) -> Collection[str]:
        instances = self._instances_in(before)
        lost = self._find_lost(instances, outcome.model)
        first = next((instance for instance in instances if instance.name in lost), None)
        if first is None:
            return ()
        return [site.tight.name for site in first.pins] + ([first.core.value] if first.core else [])

    def reproduces(self, part: DetachedModel, run: Run) -> bool:
        instances = self._instances_in(part)
        if not instances:
            return False
        outcome = run(part)
        return outcome.changed and bool(self._find_lost(instances, outcome.model))

    def _instances_in(self, part: DetachedModel) -> Sequence[Instance]:
        """The instances that `part` could lose."""
        if self.first is not None:
            return [] if self._find_lost([self.first], part) else [self.first]
        structure = structure_of(self.kind)
        return structure.find(part).instances if structure is not None else []

    def _find_lost(self, instances: Sequence[Instance], model: DetachedModel) -> dict[str, str]:
        structure = structure_of(self.kind)
        return structure.find_lost(instances, model) if structure is not None and instances else {}
