"""The nouns that every part of a pass run shares: Step, Composite, Workbench."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from passes.isolate import Worker
from passes.weights import DetachedModel

__all__ = ["Composite", "Step", "Workbench"]


@dataclass(frozen=True, slots=True)
class Workbench:
    """Where a step may work: a worker process for native code, and a folder for files that do not outlive the step."""

    worker: Worker
    folder: Path


class Step(Protocol):
    """One ONNX → ONNX pass, with its options as fields."""

    @property
    def name(self) -> str: ...

    @property
    def source(self) -> str:
        """Whose code it is: onnxoptimizer, onnxsim, onnxscript, onnx, or onnxline."""
        ...

    def apply(self, model: DetachedModel, bench: Workbench) -> DetachedModel:
        """A new model; the one given stays as it is.

        Raises:
            StepFailed: the pass raised, crashed or timed out.
        """
        ...


@runtime_checkable
class Composite(Step, Protocol):
    """A step that runs passes of its own inside, and can leave named ones out."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """The inner passes that `without` took out."""
        ...

    def check(self, bench: Workbench) -> None:
        """Refuse options that the installed release does not take.

        Raises:
            PolicyMistake: naming the nearest option or pass.
        """
        ...

    def inner(self, bench: Workbench) -> tuple[str, ...]:
        """The inner passes that this step would run, in the order in which the library lists them."""
        ...

    def without(self, names: Sequence[str]) -> Composite: ...
