"""Replay a recipe call by call, with nothing kept, pinned or reverted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from passes.context import PassContext
from passes.errors import StepFailed
from passes.model.canonical import canonical_digest
from passes.model.signature import keep_signature
from passes.run.receive import apply_step
from passes.step import Repeat, Step
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class StepGroup:
    """Neighbouring steps of a recipe that one call can run (`Step.join`).

    `place` is the position of the first of them among all steps of the recipe.
    """

    steps: tuple[Step, ...]
    place: int


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of running steps on a model; a failure leaves the model as it was."""

    model: DetachedModel
    changed: bool = True
    failure: StepFailed | None = None


@dataclass(frozen=True, slots=True)
class ReplayedGroup:
    """One call of a replay, in one `turn` of a repeat: the model before it, and the outcome."""

    group: StepGroup
    turn: int
    before: DetachedModel
    outcome: StepOutcome


Observer = Callable[[str, str, float, float], None]
"""Called as (activity, its subject, steps done, steps in all: 0 if unknown)."""


@dataclass(slots=True)
class Runs:
    """Runs steps and counts the calls: a call with several passes is one pass run."""

    context: PassContext
    observer: Observer = lambda *_: None
    count: int = 0

    def run(self, steps: Sequence[Step], model: DetachedModel) -> StepOutcome:
        """Run the steps of one group in one call. The new model keeps the inputs and outputs of `model`."""
        self.count += 1
        step = steps[0] if len(steps) == 1 else steps[0].join(steps[1:])
        try:
            result = apply_step(step, model, self.context)
            if result.changed:
                keep_signature(model, result.model, narrows=step.narrows)
        except StepFailed as failure:
            return StepOutcome(model, False, failure.with_traceback(None))  # its frames hold models
        return StepOutcome(result.model, result.changed)


def replay(blocks: Sequence[Repeat], source: DetachedModel, runs: Runs, *, together: bool) -> Iterator[ReplayedGroup]:
    """Run a recipe on `source`, one group of steps after the other. A group that fails is left out.

    Args:
        together: neighbouring steps that one call can run are run in one; else each step runs alone.
    """
    model, place, total = source, 0, sum(len(block.steps) for block in blocks)
    for block in blocks:
        for turn in range(1, block.limit + 1):
            begun = model
            for group in _groups(block.steps, place, together=together):
                runs.observer("running the recipe", _label_of(group.steps), group.place, total)
                outcome = runs.run(group.steps, model)
                yield ReplayedGroup(group, turn, model, outcome)
                model = outcome.model
            if block.limit > 1 and canonical_digest(model) == canonical_digest(begun):
                break
        place += len(block.steps)


def _label_of(steps: Sequence[Step]) -> str:
    return steps[0].name if len(steps) == 1 else f"{steps[0].name} … {steps[-1].name}"


def join_blocks(recipe: Sequence[Step | Repeat]) -> tuple[Repeat, ...]:
    """The recipe as blocks; neighbouring steps that run once are joined into one block."""
    blocks = [item if isinstance(item, Repeat) else Repeat((item,), 1) for item in recipe]
    joined: list[Repeat] = []
    for repeats, neighbours in groupby(blocks, lambda block: block.limit > 1):
        items = list(neighbours)
        joined.extend(items if repeats else [Repeat(tuple(step for block in items for step in block.steps), 1)])
    return tuple(joined)


def _groups(steps: Sequence[Step], place: int, *, together: bool) -> Iterator[StepGroup]:
    def call_of(entry: tuple[int, Step]) -> object:
        index, step = entry
        return type(step) if together and step.joins_neighbours else index

    for _, group in groupby(enumerate(steps), call_of):
        entries = list(group)
        yield StepGroup(tuple(step for _, step in entries), place + entries[0][0])
