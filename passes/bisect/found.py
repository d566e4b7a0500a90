"""What a bisection has found, as data."""

from __future__ import annotations

from dataclasses import dataclass

from passes.diff.found import NodeLabel
from passes.weights.detached import DetachedModel

__all__ = ["Culprit", "Finding", "Smallest"]


@dataclass(frozen=True, slots=True)
class Culprit:
    """The pass at fault.

    `inner` is the pass inside of a composite step that did it; those in `others` do it too, once that one is left out.
    `place` counts the recipe's steps from 1, `turn` those of a repeat. `lost` are the structures that went at this
    step. The errors are those of the whole model, before and after the step, if numbers were looked for.
    """

    step: str
    source: str
    inner: str
    others: tuple[str, ...]
    place: int
    turn: int
    repeats: bool
    why: str
    lost: tuple[str, ...] = ()
    error_before: float | None = None
    error_after: float | None = None

    @property
    def name(self) -> str:
        """As a skip list writes it."""
        return f"{self.step}/{self.inner}" if self.inner else self.step


@dataclass(frozen=True, slots=True)
class Smallest:
    """The smallest model, with the nodes that the step takes out of it and puts into it. For a step that breaks down
    `removed` are all its nodes. `seconds` and `runs` are what it took to make it small."""

    model: DetachedModel
    removed: tuple[NodeLabel, ...] = ()
    added: tuple[NodeLabel, ...] = ()
    changed: tuple[str, ...] = ()
    """What is otherwise of the nodes that stay: attributes, inputs, stored tensors."""
    elsewhere: int = 0
    """Other places at which nodes came or went."""
    runs: int = 0
    seconds: float = 0.0

    @property
    def nodes(self) -> int:
        return len(self.model.proto.graph.node)


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked for, and what was found; without a culprit `nothing` says what is right.

    `runs` counts the pass runs that it took to name the culprit, each one call of a library; `failed` are steps that
    were left out since they do not run; `notes` say where the answer is less than plain.
    """

    fault: str
    steps: int
    culprit: Culprit | None
    smallest: Smallest | None
    nothing: str
    runs: int
    seconds: float
    failed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
