"""The states that a model goes through under a recipe, with nothing kept, pinned or reverted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from passes.context import PassContext
from passes.errors import StepFailed
from passes.external.onnxoptimizer import OnnxOptimizerPass, OnnxOptimizerPasses
from passes.model.canonical import canonical_digest
from passes.model.signature import keep_signature
from passes.step import Repeat, Step
from passes.weights.detached import DetachedModel

__all__ = ["Made", "Observer", "Part", "Runs", "Stretch", "join_blocks", "route"]


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring steps of a recipe that one call can run: passes of onnxoptimizer, or one step of another library.

    `place` is that of the first of them among all steps of the recipe.
    """

    steps: tuple[Step, ...]
    place: int


@dataclass(frozen=True, slots=True)
class Made:
    """What a run made of a model: another model, the very same one, or a failure."""

    model: DetachedModel
    failure: StepFailed | None = None


@dataclass(frozen=True, slots=True)
class Stretch:
    """One part of the way, in one `turn` of a repeat: the model before it, and what came out."""

    part: Part
    turn: int
    before: DetachedModel
    made: Made


Observer = Callable[[str, str, float, float], None]
"""Called as (what is being done, with what, how much of it is done, of how much: 0 where that is not known)."""


@dataclass(slots=True)
class Runs:
    """Runs steps, and counts: a call of a library is one pass run, also where it is given several passes."""

    bench: PassContext
    observer: Observer = lambda *_: None
    count: int = 0

    def run(self, steps: Sequence[Step], model: DetachedModel) -> Made:
        """Neighbouring steps of one part, in one call; what they make has the inputs and outputs of `model`."""
        self.count += 1
        step = steps[0] if len(steps) == 1 else OnnxOptimizerPasses(tuple(one.name for one in steps))
        try:
            made = step.apply(model, self.bench)
            if made is not model:
                keep_signature(model, made, narrows=step.narrows)
        except StepFailed as failure:
            return Made(model, failure)
        return Made(made)


def route(blocks: Sequence[Repeat], source: DetachedModel, runs: Runs, *, together: bool) -> Iterator[Stretch]:
    """Run a recipe on `source`, a part after the other. A part that fails is left out.

    Args:
        together: passes of onnxoptimizer that follow each other run in one call; else each step runs alone.
    """
    model, place, total = source, 0, sum(len(block.steps) for block in blocks)
    for block in blocks:
        for turn in range(1, block.limit + 1):
            begun = model
            for part in _parts(block.steps, place, together=together):
                runs.observer("running the recipe", _label_of(part.steps), part.place, total)
                made = runs.run(part.steps, model)
                yield Stretch(part, turn, model, made)
                model = made.model
            if block.limit > 1 and canonical_digest(model) == canonical_digest(begun):
                break
        place += len(block.steps)


def _label_of(steps: Sequence[Step]) -> str:
    return steps[0].name if len(steps) == 1 else f"{steps[0].name} … {steps[-1].name}"


def join_blocks(recipe: Sequence[Step | Repeat]) -> tuple[Repeat, ...]:
    """The recipe in blocks, with all that stands beside each other and runs once as one of them."""
    blocks = [item if isinstance(item, Repeat) else Repeat((item,), 1) for item in recipe]
    found: list[Repeat] = []
    for repeats, group in groupby(blocks, lambda block: block.limit > 1):
        items = list(group)
        found.extend(items if repeats else [Repeat(tuple(step for block in items for step in block.steps), 1)])
    return tuple(found)


def _parts(steps: Sequence[Step], place: int, *, together: bool) -> Iterator[Part]:
    def key(entry: tuple[int, Step]) -> int:
        return -1 if together and isinstance(entry[1], OnnxOptimizerPass) else entry[0]

    for _, group in groupby(enumerate(steps), key):
        entries = list(group)
        yield Part(tuple(step for _, step in entries), place + entries[0][0])
