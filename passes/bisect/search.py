"""Find where a fault shows first: after which step of a recipe, and inside of a composite step at which pass.

The recipe runs with nothing kept, pinned or reverted, one step at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from passes.bisect.faults import Fault, Sighting, StepOutcome
from passes.context import PassContext
from passes.errors import StepFailed, StepTimedOut
from passes.model.canonical import canonical_digest
from passes.model.signature import keep_signature
from passes.policy.policy import DESTROYS
from passes.run.narrow import minimal_culprits, primary_culprit
from passes.run.receive import apply_step
from passes.step import Repeat, Step
from passes.weights.detached import DetachedModel

Observer = Callable[[str, str, float, float], None]
"""Called as (activity, its subject, steps done, steps in all: 0 if unknown)."""


@dataclass(slots=True)
class Runs:
    """Runs steps, and counts them."""

    context: PassContext
    observer: Observer = lambda *_: None
    count: int = 0

    def run(self, step: Step, model: DetachedModel) -> StepOutcome:
        """Run one step. The new model keeps the inputs and outputs of `model`."""
        self.count += 1
        try:
            result = apply_step(step, model, self.context)
            if result.changed:
                keep_signature(model, result.model, narrows=step.narrows)
        except StepFailed as failure:
            return StepOutcome(model, False, failure.with_traceback(None))  # its frames hold models
        return StepOutcome(result.model, result.changed)


@dataclass(frozen=True, slots=True)
class GuiltyStep:
    """The step that shows the fault, which `before` does not show yet. `place` counts the steps of the recipe from 0,
    `turn` the rounds of a repeat from 1."""

    step: Step
    place: int
    turn: int
    before: DetachedModel
    outcome: StepOutcome
    sighting: Sighting


def find_guilty(
    blocks: Sequence[Repeat], source: DetachedModel, fault: Fault, runs: Runs
) -> tuple[GuiltyStep | None, tuple[str, ...]]:
    """The first step after which the model shows `fault`, and the steps before it that fail and were left out."""
    model, place, failed = source, 0, []
    total = sum(len(block.steps) for block in blocks)
    for block in blocks:
        for turn in range(1, block.limit + 1):
            begun_with = model
            for index, step in enumerate(block.steps, place):
                runs.observer("running the recipe", step.name, index, total)
                outcome = runs.run(step, model)
                sighting = fault.observe(outcome) if outcome.changed or outcome.failure is not None else None
                if sighting is not None:
                    return GuiltyStep(step, index, turn, model, outcome, sighting), tuple(failed)
                if outcome.failure is not None:
                    failed.append(f"{step.name}: {' '.join(str(outcome.failure).split())}")
                model = outcome.model
            if block.limit > 1 and canonical_digest(model) == canonical_digest(begun_with):
                break
        place += len(block.steps)
    return None, tuple(failed)


@dataclass(frozen=True, slots=True)
class InnerCulprit:
    """`primary` causes the fault; `others` do once it is left out. Empty if the step cannot be narrowed."""

    primary: str = ""
    others: tuple[str, ...] = ()


def find_inner(guilty: GuiltyStep, fault: Fault, runs: Runs) -> InnerCulprit:
    """Find the pass inside of a step by running it without some of its passes; known suspects are tried first."""
    step = guilty.step
    # Each run would end at the time limit: that costs more than the name is worth.
    if not step.is_composite or isinstance(guilty.outcome.failure, StepTimedOut):
        return InnerCulprit()
    tried: dict[tuple[str, ...], StepOutcome] = {}

    def without(names: tuple[str, ...]) -> StepOutcome:
        key = tuple(sorted(names))
        if key not in tried:
            runs.observer(f"looking inside of {step.name}", f"without {', '.join(names)}", 0, 0)
            tried[key] = runs.run(step.without(names), guilty.before)
        return tried[key]

    def is_good(names: tuple[str, ...]) -> bool:
        outcome = without(names)
        return outcome.failure is None and fault.observe(outcome) is None

    def does_the_same(names: tuple[str, ...]) -> bool:
        outcome = without(names)
        if outcome.failure or guilty.outcome.failure:
            return outcome.failure is not None and guilty.outcome.failure is not None
        return canonical_digest(outcome.model) == canonical_digest(guilty.outcome.model)

    suspects = [name for name, destroyed in DESTROYS.items() if set(fault.kinds) & set(destroyed)]
    culprits = minimal_culprits(step.inner(runs.context), suspects or step.suspects, is_good)
    if culprits is None:
        return InnerCulprit()
    primary = primary_culprit(culprits, does_the_same)
    return InnerCulprit(primary, tuple(name for name in culprits if name != primary))
