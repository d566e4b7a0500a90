"""The steps of a guarded call: an optimizer that runs in this process, and a step that keeps its last result."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from passes.context import PassContext
from passes.errors import StepFailed
from passes.guard.calls.base import CallPlan, Skips
from passes.step import CompositeStep, PassResult, Step
from passes.weights.detached import PROTOBUF_LIMIT, DetachedModel, read_model
from passes.weights.files import save

__all__ = ["InProcessStep", "RecordedStep", "plan_without"]


@dataclass(frozen=True, slots=True)
class InProcessStep(CompositeStep):
    """`run(source, target, left_out)` optimizes `source` into `target` without the inner passes `left_out`."""

    name: str
    names: tuple[str, ...]
    """Its inner passes."""
    run: Callable[[str, str, Sequence[str]], None]
    narrows: bool = False
    """Whether the caller gave it other input shapes than those that the model declares."""
    left_out: tuple[str, ...] = ()
    suspects: ClassVar[tuple[str, ...]] = ("constant_folding", "shape_inference")

    @property
    def source(self) -> str:  # type: ignore[override]
        return self.name

    def apply(self, model: DetachedModel, bench: PassContext) -> PassResult:
        folder = Path(tempfile.mkdtemp(dir=bench.folder, prefix="here-"))  # the weights stay in it, mapped
        source, target = folder / "before.onnx", folder / "after.onnx"
        save(model, source, external_from=PROTOBUF_LIMIT)
        try:
            self.run(str(source), str(target), self.left_out)
        except Exception as error:  # whatever an optimizer raises
            raise StepFailed(f"{type(error).__name__}: {error}") from error
        return PassResult(read_model(target, known=model.weights))

    def inner(self, bench: PassContext) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self.left_out)


@dataclass(frozen=True, slots=True)
class RecordedStep(Step):
    """Runs `step` and keeps its last result."""

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

    def apply(self, model: DetachedModel, bench: PassContext) -> PassResult:
        result = self.step.apply(model, bench)
        self.results[:] = [result.model]
        return result

    def check(self, bench: PassContext) -> None:
        self.step.check(bench)

    def inner(self, bench: PassContext) -> tuple[str, ...]:
        return self.step.inner(bench)

    def extras(self, bench: PassContext) -> tuple[str, ...]:
        return self.step.extras(bench)

    def without(self, names: Sequence[str]) -> RecordedStep:
        return replace(self, step=self.step.without(names))


def plan_without(step: Step, inner: Sequence[str], skips: Skips, notes: tuple[str, ...]) -> CallPlan:
    """The plan of one composite step, less what is skipped of its passes `inner`."""
    skipped = {name: skip.reason for name in (f"{step.name}/{each}" for each in inner) if (skip := skips(name))}
    left_out = [name.partition("/")[2] for name in skipped]
    return CallPlan((RecordedStep(step.without(left_out)),), skipped, notes)
