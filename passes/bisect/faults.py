"""What a bisection looks for: a structure that is lost, a step that breaks down. Numbers are in deviation.py."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

from passes.bisect.route import Made
from passes.errors import PolicyError
from passes.policy.policy import unknown_structure
from passes.run.reproduce import is_same_failure
from passes.structures import Instance, structure_of
from passes.weights.detached import DetachedModel

__all__ = ["Breakdown", "Fault", "Loss", "Run", "Sighting"]

Run = Callable[[DetachedModel], Made]
"""Runs one step."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """The fault, as a model or a failure shows it: `lost` are structures, `error` is the largest at an output."""

    why: str
    lost: tuple[str, ...] = ()
    error: float | None = None


class Fault(Protocol):
    """What is looked for. It knows the source model, which does not show it."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The structures that it is about, for which some passes are known."""
        ...

    @property
    def absent(self) -> str:
        """What is right where the fault is nowhere."""
        ...

    @property
    def told(self) -> str:
        """What is looked for, in words."""
        ...

    def seen(self, made: Made) -> Sighting | None:
        """Whether what steps have made of the source shows it."""
        ...

    def measured(self, model: DetachedModel) -> float | None:
        """How far `model` is from the source, if that is what this is about."""
        ...

    def of_one_step(self, before: DetachedModel, made: Made) -> Self:
        """What of it a single step shows, which has made this of `before`."""
        ...

    def place(self, before: DetachedModel, made: Made) -> Collection[str]:
        """Values at which it is first seen; none if that is not known."""
        ...

    def shown(self, part: DetachedModel, run: Run) -> bool:
        """Whether the step that `run` runs shows it on `part`, which may be any model."""
        ...


@dataclass(frozen=True, slots=True)
class Loss:
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
    def absent(self) -> str:
        count = len(self.instances)
        return f"nothing lost: {f'all {count} {self.kind} stand' if count > 1 else f'the one {self.kind} stands'}"

    @property
    def told(self) -> str:
        return f"lost {self.kind}"

    def seen(self, made: Made) -> Sighting | None:
        lost = {} if made.failure else self._lost(self.instances, made.model)
        if not lost:
            return None
        names = tuple(lost)
        return Sighting(f"{self.kind} {names[0]}: {lost[names[0]]}", names)

    def measured(self, model: DetachedModel) -> float | None:
        return None

    def of_one_step(self, before: DetachedModel, made: Made) -> Self:
        if self.shown(before, lambda _: made):
            return self
        lost = self._lost(self.instances, made.model)
        return replace(self, first=next((one for one in self.instances if one.name in lost), None))

    def place(self, before: DetachedModel, made: Made) -> Collection[str]:
        instances = self._found(before)
        lost = self._lost(instances, made.model)
        first = next((one for one in instances if one.name in lost), None)
        if first is None:
            return ()
        return [pin.name for pin in first.pins] + ([first.core.value] if first.core else [])

    def shown(self, part: DetachedModel, run: Run) -> bool:
        instances = self._found(part)
        if not instances:
            return False
        made = run(part)
        return not made.failure and made.model is not part and bool(self._lost(instances, made.model))

    def _found(self, part: DetachedModel) -> Sequence[Instance]:
        """What may be lost from `part`."""
        if self.first is not None:
            return [] if self._lost([self.first], part) else [self.first]
        structure = structure_of(self.kind)
        return structure.find(part).instances if structure is not None else []

    def _lost(self, instances: Sequence[Instance], model: DetachedModel) -> dict[str, str]:
        structure = structure_of(self.kind)
        return structure.lost(instances, model) if structure is not None and instances else {}


@dataclass(frozen=True, slots=True)
class Breakdown:
    """A step crashes, runs past its time, raises, or returns something that is no such model."""

    status: str = ""
    """How it ended, once that is known."""

    @property
    def kinds(self) -> tuple[str, ...]:
        return ()

    @property
    def absent(self) -> str:
        return "nothing crashes"

    @property
    def told(self) -> str:
        return "crash"

    def seen(self, made: Made) -> Sighting | None:
        if made.failure is None:
            return None
        said = " ".join(str(made.failure).split()) or type(made.failure).__name__
        return Sighting(f"{made.failure.status.replace('_', ' ')}: {said}")

    def measured(self, model: DetachedModel) -> float | None:
        return None

    def of_one_step(self, before: DetachedModel, made: Made) -> Self:
        return self if made.failure is None else replace(self, status=made.failure.status)

    def place(self, before: DetachedModel, made: Made) -> Collection[str]:
        return ()

    def shown(self, part: DetachedModel, run: Run) -> bool:
        made = run(part)
        return made.failure is not None and is_same_failure(made.failure.status, self.status)
