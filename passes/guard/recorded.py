"""A composite step whose last result can be looked at: what a call made besides a change, such as inferred shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from passes.context import PassContext
from passes.model.weights import DetachedModel
from passes.step import Step

__all__ = ["Recorded"]


@dataclass(frozen=True, slots=True)
class Recorded(Step):
    step: Step
    results: list[DetachedModel] = field(default_factory=list)
    """At most one: the last."""
    is_composite: ClassVar[bool] = True

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.step.name

    @property
    def source(self) -> str:  # type: ignore[override]
        return self.step.source

    @property
    def left_out(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.step.left_out

    @property
    def narrows(self) -> bool:  # type: ignore[override]
        return self.step.narrows

    @property
    def suspects(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.step.suspects

    def apply(self, model: DetachedModel, bench: PassContext) -> DetachedModel:
        self.results[:] = [self.step.apply(model, bench)]
        return self.results[0]

    def check(self, bench: PassContext) -> None:
        self.step.check(bench)

    def inner(self, bench: PassContext) -> tuple[str, ...]:
        return self.step.inner(bench)

    def extras(self, bench: PassContext) -> tuple[str, ...]:
        return self.step.extras(bench)

    def without(self, names: Sequence[str]) -> Recorded:
        return replace(self, step=self.step.without(names))
