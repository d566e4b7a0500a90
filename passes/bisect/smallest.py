"""The smallest model on which a step still shows the fault, begun around the place of the fault."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from passes.bisect.faults import Fault
from passes.bisect.replay import Made, Runs
from passes.bisect.search import Guilty, Inner
from passes.errors import StepFailed
from passes.graph.traversal import reads_of
from passes.model.extraction import extract_nodes, types_of
from passes.provenance import carry
from passes.rewrites.fold_constants import FoldConstants
from passes.run.reproduce import smallest
from passes.step import Step
from passes.structures.view import GraphView
from passes.weights.detached import DetachedModel

__all__ = ["Shown", "begin_near", "find_smallest"]


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
    focused = _focus(guilty.step, inner, runs)
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
        if time.monotonic() > self.deadline or not self.fault.reproduces(part, run):
            return False
        self.last = Shown(part, tried[-1])
        return True


def _focus(step: Step, inner: Inner, runs: Runs) -> Step | None:
    """The step with no other passes inside than the one at fault, beside its fixed stages; None if it has none."""
    if not step.is_composite or not inner.primary_culprit:
        return None
    return step.without(
        [name for name in step.inner(runs.bench) if name not in (inner.primary_culprit, *step.suspects)]
    )


def _as_named(source: DetachedModel, made: DetachedModel) -> DetachedModel:
    """`made`, whose nodes have got back what is known of them in `source`, where they come from there."""
    if made is source:
        return made
    copy = type(made.proto)()
    copy.CopyFrom(made.proto)
    return carry(source, made.with_proto(copy), "earlier passes")


HOPS: Final = range(2, 13)
"""How many nodes away from the place the parts to try end. Most are refused without a run, as they lack something."""


def begin_near(
    model: DetachedModel, values: Collection[str], shows: Callable[[DetachedModel], bool]
) -> DetachedModel | None:
    """A part of `model` around where `values` are made on which `shows` holds; None if that is only the whole of it."""
    types = types_of(model.proto) if values else {}
    for chosen in _around(model, values):
        if len(chosen) == len(model.proto.graph.node):
            break
        part = extract_nodes(model, [model.proto.graph.node[place] for place in sorted(chosen)], types)
        if part is not None and shows(part):
            return part
    return model if shows(model) else None


def _around(model: DetachedModel, values: Collection[str]) -> Iterator[set[int]]:
    """The places of the nodes around those that make `values`, further and further, with the constants that they read.

    No way leads through what is computed from constants alone: many parts of a model share that.
    """
    view = GraphView(model)
    nodes = list(model.proto.graph.node)
    folded = {place for place, node in enumerate(nodes) if view.folded.issuperset(node.output)}
    makers = {name: place for place, node in enumerate(nodes) for name in node.output}
    before = [{makers[name] for name in reads_of(node) if name in makers} for node in nodes]
    neighbours: dict[int, set[int]] = defaultdict(set)
    for place in set(range(len(nodes))) - folded:
        for maker in before[place] - folded:
            neighbours[place].add(maker)
            neighbours[maker].add(place)
    chosen = {makers[name] for name in values if name in makers}
    for hop in range(1, HOPS[-1] + 1 if chosen else 0):
        chosen = chosen.union(*(neighbours[place] for place in chosen))
        if hop in HOPS:
            yield _with_constants(chosen, before, folded)


def _with_constants(chosen: set[int], before: Sequence[set[int]], folded: set[int]) -> set[int]:
    whole, front = set(chosen), set(chosen)
    while front:
        front = set().union(*(before[place] & folded for place in front)) - whole
        whole |= front
    return whole
