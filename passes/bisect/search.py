"""Where a fault shows first: between the parts of a recipe, by halves inside of one, and inside of a composite step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from passes.bisect.faults import Fault, Sighting
from passes.bisect.replay import Made, Runs, Stretch, route
from passes.errors import StepTimedOut
from passes.model.canonical import canonical_digest
from passes.policy.known_passes import DESTROYS
from passes.run.narrow import minimal_culprits, primary_culprit
from passes.step import Repeat, Step
from passes.weights.detached import DetachedModel

__all__ = ["Guilty", "Inner", "Nothing", "find_guilty", "find_inner"]


HIDDEN: Final = (
    "with neighbouring passes in one call nothing is wrong after them; one at a time they show it: "
    "a later pass repairs it, or one call does otherwise than many"
)


@dataclass(frozen=True, slots=True)
class Guilty:
    """The step that shows the fault: on `before` nothing was wrong yet. `failed` are steps before it, left out."""

    step: Step
    place: int
    turn: int
    before: DetachedModel
    made: Made
    sighting: Sighting
    failed: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Nothing:
    """No step shows it; `failed` were left out."""

    failed: tuple[str, ...] = ()
    each_alone: bool = True
    """Whether each step was run by itself."""


class _Unclear(Exception):
    """Passes in one call do not tell: one that fails hides the others, or each alone does otherwise."""


def find_guilty(blocks: Sequence[Repeat], source: DetachedModel, fault: Fault, runs: Runs) -> Guilty | Nothing:
    """The first step after which `fault` is seen.

    Parts of the blocks are run in order, a part of onnxoptimizer's passes in one call, and where one shows the fault,
    it is halved until a single pass is left, which then has to show it alone. If no part shows it, or calls with
    several passes do not tell, all steps are run one at a time.
    """
    note = ""
    try:
        found = _first(blocks, source, fault, runs, together=True)
        if isinstance(found, Guilty) or found.each_alone:
            return found
        note = HIDDEN
    except _Unclear:
        pass
    found = _first(blocks, source, fault, runs, together=False)
    return replace(found, note=note) if isinstance(found, Guilty) else found


def _first(
    blocks: Sequence[Repeat], source: DetachedModel, fault: Fault, runs: Runs, *, together: bool
) -> Guilty | Nothing:
    failed: list[str] = []
    each_alone = True
    for stretch in route(blocks, source, runs, together=together):
        each_alone &= len(stretch.part.steps) == 1
        sighting = _observe(fault, stretch.before, stretch.made)
        if sighting is not None:
            return _halve(stretch, sighting, fault, runs, tuple(failed))
        if stretch.made.failure is not None:
            step, *others = stretch.part.steps
            if others:
                raise _Unclear
            failed.append(f"{step.name}: {' '.join(str(stretch.made.failure).split())}")
    return Nothing(tuple(failed), each_alone)


def _halve(stretch: Stretch, sighting: Sighting, fault: Fault, runs: Runs, failed: tuple[str, ...]) -> Guilty:
    """The single step of a stretch that shows the fault. What came before the stretch does not.

    Raises:
        _Unclear: a call fails with something else, or the step that is left does not show it alone.
    """
    steps, before, made = stretch.part.steps, stretch.before, stretch.made
    low, high, since = 0, len(steps), 0
    while high - low > 1:
        middle = (low + high) // 2
        runs.observer("halving a call of several passes", steps[low].name, len(steps) - (high - low), len(steps))
        attempt = runs.run(steps[low:middle], before)
        seen = _observe(fault, before, attempt)
        if seen is not None:
            high, since, made, sighting = middle, low, attempt, seen
        elif attempt.failure is not None:
            raise _Unclear
        else:
            low, before = middle, attempt.model
    if since != low:  # it has been seen in a longer call only
        made = runs.run(steps[low:high], before)
        alone = _observe(fault, before, made)
        if alone is None:
            raise _Unclear
        sighting = alone
    return Guilty(steps[low], stretch.part.place + low, stretch.turn, before, made, sighting, failed)


def _observe(fault: Fault, before: DetachedModel, made: Made) -> Sighting | None:
    return None if made.model is before and made.failure is None else fault.observe(made)


@dataclass(frozen=True, slots=True)
class Inner:
    """`primary_culprit` has done it; `others` would, were it left out. Empty if the step cannot be narrowed."""

    primary_culprit: str = ""
    others: tuple[str, ...] = ()


def find_inner(guilty: Guilty, fault: Fault, runs: Runs) -> Inner:
    """Ask by running the step without some of its passes; known suspects are tried first."""
    step = guilty.step
    # To wait for many more time limits would cost more than the name is worth.
    if not step.is_composite or isinstance(guilty.made.failure, StepTimedOut):
        return Inner()
    tried: dict[tuple[str, ...], Made] = {}

    def without(names: tuple[str, ...]) -> Made:
        key = tuple(sorted(names))
        if key not in tried:
            runs.observer(f"looking inside of {step.name}", f"without {', '.join(names)}", 0, 0)
            tried[key] = runs.run([step.without(names)], guilty.before)
        return tried[key]

    def is_good(names: tuple[str, ...]) -> bool:
        made = without(names)
        return made.failure is None and fault.observe(made) is None

    def does_the_same(names: tuple[str, ...]) -> bool:
        made = without(names)
        if made.failure or guilty.made.failure:
            return made.failure is not None and guilty.made.failure is not None
        return canonical_digest(made.model) == canonical_digest(guilty.made.model)

    suspects = [name for name, destroyed in DESTROYS.items() if set(fault.kinds) & set(destroyed)]
    found = minimal_culprits(step.inner(runs.bench), suspects or step.suspects, is_good)
    if found is None:
        return Inner()
    one = primary_culprit(found, does_the_same)
    return Inner(one, tuple(name for name in found if name != one))
