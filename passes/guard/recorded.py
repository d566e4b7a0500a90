"""A composite step whose last result can be looked at: what a call made besides a change, such as inferred shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from passes.step import Composite, Narrows, Workbench
from passes.weights.detached import DetachedModel

__all__ = ["Recorded"]


@dataclass(frozen=True, slots=True)
class Recorded:
    step: Composite
    results: list[DetachedModel] = field(default_factory=list)
    """At most one: the last."""

    @property
    def name(self) -> str:
        return self.step.name

    @property
    def source(self) -> str:
        return self.step.source

    @property
    def left_out(self) -> tuple[str, ...]:
        return self.step.left_out

    @property
    def narrows(self) -> bool:
        return isinstance(self.step, Narrows) and self.step.narrows

    def apply(self, model: DetachedModel, bench: Workbench) -> DetachedModel:
        self.results[:] = [self.step.apply(model, bench)]
        return self.results[0]

    def check(self, bench: Workbench) -> None:
        self.step.check(bench)

    def inner(self, bench: Workbench) -> tuple[str, ...]:
        return self.step.inner(bench)

    def without(self, names: Sequence[str]) -> Recorded:
        return replace(self, step=self.step.without(names))
