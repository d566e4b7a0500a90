"""Find where a fault shows first: after which call, by halves inside of one call, and inside of a composite step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from passes.bisect.faults import Fault, Sighting
from passes.bisect.replay import ReplayedGroup, Runs, StepOutcome, replay
from passes.errors import StepTimedOut
from passes.model.canonical import canonical_digest
from passes.policy.known_passes import DESTROYS
from passes.run.narrow import minimal_culprits, primary_culprit
from passes.step import Repeat, Step
from passes.weights.detached import DetachedModel

HIDDEN: Final = (
    "with neighbouring passes in one call nothing is wrong after them; one at a time they show it: "
    "a later pass repairs it, or one call acts differently from many"
)


@dataclass(frozen=True, slots=True)
class GuiltyStep:
    """The step that shows the fault, which `before` does not show yet. `failed` are earlier steps, left out."""

    step: Step
    place: int
    turn: int
    before: DetachedModel
    outcome: StepOutcome
    sighting: Sighting
    failed: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class NotFound:
    """No step shows the fault; `failed` are steps that were left out."""

    failed: tuple[str, ...] = ()
    each_alone: bool = True
    """Whether each step was run by itself."""


class _Unclear(Exception):
    """A call with several passes is no evidence: one that fails hides the others, or each acts differently alone."""


def find_guilty(blocks: Sequence[Repeat], source: DetachedModel, fault: Fault, runs: Runs) -> GuiltyStep | NotFound:
    """The first step after which the model shows `fault`.

    Groups of steps run in order, those that can be joined in one call. A group that shows the fault is
    halved until a single pass is left, which then has to show the fault alone. If no group shows the fault, or a call
    with several passes is no evidence, all steps run one at a time.
    """
    note = ""
    try:
        first = _first(blocks, source, fault, runs, together=True)
        if isinstance(first, GuiltyStep) or first.each_alone:
            return first
        note = HIDDEN
    except _Unclear:
        pass
    first = _first(blocks, source, fault, runs, together=False)
    return replace(first, note=note) if isinstance(first, GuiltyStep) else first


def _first(
    blocks: Sequence[Repeat], source: DetachedModel, fault: Fault, runs: Runs, *, together: bool
) -> GuiltyStep | NotFound:
    failed: list[str] = []
    each_alone = True
    for replayed in replay(blocks, source, runs, together=together):
        each_alone &= len(replayed.group.steps) == 1
        sighting = _observe(fault, replayed.before, replayed.outcome)
        if sighting is not None:
            return _halve(replayed, sighting, fault, runs, tuple(failed))
        if replayed.outcome.failure is not None:
            step, *others = replayed.group.steps
            if others:
                raise _Unclear
            failed.append(f"{step.name}: {' '.join(str(replayed.outcome.failure).split())}")
    return NotFound(tuple(failed), each_alone)


def _halve(
    replayed: ReplayedGroup, sighting: Sighting, fault: Fault, runs: Runs, failed: tuple[str, ...]
) -> GuiltyStep:
    """Find the single step of a replayed group that shows the fault. The model before the group does not show it.

    Raises:
        _Unclear: a call fails with something else, or the step that is left does not show it alone.
    """
    steps, before, outcome = replayed.group.steps, replayed.before, replayed.outcome
    low, high, since = 0, len(steps), 0
    while high - low > 1:
        middle = (low + high) // 2
        runs.observer("halving a call of several passes", steps[low].name, len(steps) - (high - low), len(steps))
        attempt = runs.run(steps[low:middle], before)
        observation = _observe(fault, before, attempt)
        if observation is not None:
            high, since, outcome, sighting = middle, low, attempt, observation
        elif attempt.failure is not None:
            raise _Unclear
        else:
            low, before = middle, attempt.model
    if since != low:  # only a longer call has shown it
        outcome = runs.run(steps[low:high], before)
        alone = _observe(fault, before, outcome)
        if alone is None:
            raise _Unclear
        sighting = alone
    return GuiltyStep(steps[low], replayed.group.place + low, replayed.turn, before, outcome, sighting, failed)


def _observe(fault: Fault, before: DetachedModel, outcome: StepOutcome) -> Sighting | None:
    return fault.observe(outcome) if outcome.changed or outcome.failure is not None else None


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
            tried[key] = runs.run([step.without(names)], guilty.before)
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
