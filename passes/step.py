"""The nouns that every part of a pass run shares: Step, CompositeStep, Repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Self

from passes.context import PassContext
from passes.weights.detached import DetachedModel

__all__ = ["MAX_TURNS", "CompositeStep", "Repeat", "Step", "flatten"]

MAX_TURNS: Final = 20
"""Turns after which a fixed point is given up."""


class Step:
    """One ONNX → ONNX pass, with its options as the fields of a frozen dataclass.

    A subclass gives it a `name`, a `source` and `apply`; the rest has defaults, which suit a step that runs no other
    passes inside.
    """

    __slots__ = ()

    name: str
    source: str
    """Whose code it is: onnxoptimizer, onnxsim, onnxscript, onnx, or onnxline."""
    left_out: tuple[str, ...] = ()
    """The inner passes that `without` took out."""

    is_composite: ClassVar[bool] = False
    """Whether it runs passes of its own inside, and can leave named ones out."""

    annotates: ClassVar[bool] = False
    """Whether the types, names and metadata that it writes are a result, also where no operator changes. Native
    optimizers drop and rewrite them all the time, which is no change."""

    suspects: ClassVar[tuple[str, ...]] = ()
    """Inner passes to suspect first of a fault that no pass is known for."""

    joins_weights: ClassVar[tuple[str, ...]] = ()
    """Inner passes that read weights by the gigabyte, to make new ones of them."""

    makes_structures: ClassVar[tuple[str, ...]] = ()
    """Kinds of structures that it makes: they are looked for in its result, and what is new counts from there on."""

    narrows: bool = False
    """Whether it was asked to give the model's inputs other shapes than those that they declare."""

    def apply(self, model: DetachedModel, bench: PassContext) -> DetachedModel:
        """A new model, or the very same object for no change; the one given stays as it is.

        Raises:
            StepFailed: the pass raised, crashed or timed out.
        """
        raise NotImplementedError

    def remark(self, model: DetachedModel) -> str:
        """What it has left as it is in `model`, its own result, and why; empty for nothing."""
        return ""

    def check(self, bench: PassContext) -> None:
        """Refuse options that the installed release does not take.

        Raises:
            PolicyError: naming the nearest option or pass.
        """

    def inner(self, bench: PassContext) -> tuple[str, ...]:
        """The inner passes that this step would run, in the order in which the library lists them."""
        return ()

    def known_inner(self, bench: PassContext) -> tuple[str, ...]:
        """Every inner pass that a skip list may name."""
        return (*self.inner(bench), *self.left_out, *self.extras(bench))

    def extras(self, bench: PassContext) -> tuple[str, ...]:
        """Inner passes that run only where an option of the step names them."""
        return ()

    def without(self, names: Sequence[str]) -> Step:
        """The same step, which leaves out these inner passes."""
        return self


class CompositeStep(Step):
    """A step that runs passes of its own inside; those in its field `left_out` do not run."""

    __slots__ = ()

    is_composite: ClassVar[bool] = True

    def without(self, names: Sequence[str]) -> Self:
        own: Any = self  # a dataclass
        return replace(own, left_out=tuple(dict.fromkeys((*self.left_out, *names))))


@dataclass(frozen=True, slots=True)
class Repeat:
    """Steps that run in turns, until one turn changes nothing, or `limit` of them are done."""

    steps: tuple[Step, ...]
    limit: int = MAX_TURNS


def flatten(recipe: Sequence[Step | Repeat]) -> list[Step]:
    """The steps of a recipe, those of a fixed point once."""
    return [step for item in recipe for step in (item.steps if isinstance(item, Repeat) else (item,))]
