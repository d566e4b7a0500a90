"""The smallest model on which a step still shows the fault."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from passes.bisect.faults import Fault
from passes.bisect.inner import Inner
from passes.bisect.near import begin_near
from passes.bisect.route import Made, Runs
from passes.bisect.search import Guilty
from passes.errors import StepFailed
from passes.model.weights import DetachedModel
from passes.provenance import carry
from passes.rewrites.fold_constants import FoldConstants
from passes.run.reproduce import smallest
from passes.step import Step

__all__ = ["Shown", "find_smallest"]


def find_smallest(
    guilty: Guilty, inner: Inner, source: DetachedModel, fault: Fault, runs: Runs, budget_s: float
) -> Shown | None:
    """A part of the model from before the guilty step on which that step alone shows the fault, and what it makes of
    it; None if not even the whole of it does, by itself.

    Nodes are called as in `source`. What is found within `budget_s` counts. Of a composite step only the pass at fault
    runs at first, which is quicker by far; what is left has to show the fault with all of them.
    """
    whole = _as_named(source, guilty.before)
    alone = fault.of_one_step(guilty.before, guilty.made)
    deadline = time.monotonic() + budget_s
    place = alone.place(whole, guilty.made)
    focused = _focused(guilty.step, inner, runs)
    if focused is not None:
        quick, proof = _Search(focused, alone, runs, deadline, budget_s), _Search(guilty.step, alone, runs, math.inf)
        begun = begin_near(whole, place, quick.shows)
        if begun is not None and proof.shows(_smaller(begun, quick, deadline)):
            return proof.last
    search = _Search(guilty.step, alone, runs, deadline, budget_s)
    begun = begin_near(whole, place, search.shows)
    if begun is not None:
        _smaller(begun, search, deadline)
    return search.last


def _smaller(begun: DetachedModel, search: _Search, deadline: float) -> DetachedModel:
    """The smallest part of `begun`, or of what is left of it when constants are stored as what they come to."""
    try:
        folded = FoldConstants().apply(begun, search.runs.bench)
    except StepFailed:
        folded = begun
    start = folded if folded is not begun and search.shows(folded) else begun
    return smallest(start, search.shows, deadline, shorten=True)


@dataclass(frozen=True, slots=True)
class Shown:
    """A model that shows the fault, and what the step made of it."""

    model: DetachedModel
    made: Made


@dataclass(slots=True)
class _Search:
    """Asks whether `step` shows `fault`, until the deadline; `last` is the last model on which it did."""

    step: Step
    fault: Fault
    runs: Runs
    deadline: float
    budget_s: float = 0
    """Seconds from the beginning to the deadline; 0 where there is none."""
    last: Shown | None = None

    def shows(self, part: DetachedModel) -> bool:
        tried: list[Made] = []

        def run(one: DetachedModel) -> Made:
            tried.append(self.runs.run([self.step], one))
            return tried[-1]

        spent = self.budget_s - (self.deadline - time.monotonic()) if self.budget_s else 0
        smallest_so_far = part if self.last is None else self.last.model
        left = f"{len(smallest_so_far.proto.graph.node)} nodes left"
        self.runs.observer("making the model smaller", left, spent, self.budget_s)
        if time.monotonic() > self.deadline or not self.fault.shown(part, run):
            return False
        self.last = Shown(part, tried[-1])
        return True


def _focused(step: Step, inner: Inner, runs: Runs) -> Step | None:
    """The step with no other passes inside than the one at fault, beside its fixed stages; None if it has none."""
    if not step.is_composite or not inner.doer:
        return None
    return step.without([name for name in step.inner(runs.bench) if name not in (inner.doer, *step.suspects)])


def _as_named(source: DetachedModel, made: DetachedModel) -> DetachedModel:
    """`made`, whose nodes have got back what is known of them in `source`, where they come from there."""
    if made is source:
        return made
    copy = type(made.proto)()
    copy.CopyFrom(made.proto)
    return carry(source, made.with_proto(copy), "earlier passes")
