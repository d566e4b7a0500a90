"""The nouns that every part of a pass run shares: Step, Composite, Workbench."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from passes.weights.detached import DetachedModel
from passes.weights.sharing import WeightFile
from passes.worker.client import Worker

__all__ = ["MAX_TURNS", "Annotates", "Composite", "Early", "Narrows", "Repeat", "Step", "Workbench", "flat"]

MAX_TURNS: Final = 20
"""Turns after which a fixed point is given up."""


@dataclass(frozen=True, slots=True)
class Workbench:
    """Where a step may work: a worker process for native code, one for proofs, and a folder for files that do not
    outlive the run. `passes.context.open_bench` sets one up and clears it away."""

    worker: Worker
    folder: Path
    proofs: Worker = field(default_factory=Worker)
    spill: WeightFile = field(init=False)
    notes: dict[str, Any] = field(default_factory=dict)
    """What a step leaves for the steps after it, under the name of its library."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "spill", WeightFile(self.folder))

    def start(self) -> None:
        """Start the workers now, so that they are ready when they are called."""
        self.worker.start()
        self.proofs.start()


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
class Early(Step, Protocol):
    """A step that can begin on a model before it is known whether it will be its turn, and then looks further ahead."""

    @property
    def ahead(self) -> tuple[str, ...]:
        """The passes that it looks at beside its own."""
        ...

    def looking_past(self, names: Collection[str]) -> Early:
        """The same step, which looks at none of `names`."""
        ...

    def begin(self, model: DetachedModel, bench: Workbench) -> None:
        """Begin in the worker, without waiting; `apply` goes on from there if it is given the same model."""
        ...

    def foreseen(self, model: DetachedModel, bench: Workbench) -> DetachedModel | None:
        """What this step and those that it looks at will have made of `model` in the end, if none is thrown away; None
        if that is not known yet, or is no change."""
        ...


@runtime_checkable
class Annotates(Step, Protocol):
    """A step whose annotations count. Native optimizers drop and rewrite them all the time, which is no change."""

    @property
    def annotates(self) -> bool:
        """Whether the types, names and metadata that it writes are a result, also where no operator changes."""
        ...


@runtime_checkable
class Narrows(Step, Protocol):
    """A step that can be asked to give the model's inputs other shapes than those that it declares."""

    @property
    def narrows(self) -> bool:
        """Whether it was."""
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
            PolicyError: naming the nearest option or pass.
        """
        ...

    def inner(self, bench: Workbench) -> tuple[str, ...]:
        """The inner passes that this step would run, in the order in which the library lists them."""
        ...

    def without(self, names: Sequence[str]) -> Composite: ...


@dataclass(frozen=True, slots=True)
class Repeat:
    """Steps that run in turns, until one turn changes nothing, or `limit` of them are done."""

    steps: tuple[Step, ...]
    limit: int = MAX_TURNS


def flat(recipe: Sequence[Step | Repeat]) -> list[Step]:
    """The steps of a recipe, those of a fixed point once."""
    return [step for item in recipe for step in (item.steps if isinstance(item, Repeat) else (item,))]
