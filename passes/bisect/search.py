"""Find where a fault shows first: after which step of a recipe, and inside of a composite step at which pass; then the
smallest model on which that step still shows the fault, starting around the values at which it shows first.

The recipe runs with nothing kept, pinned or reverted, one step at a time.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from passes.bisect.faults import Fault, Sighting, StepOutcome
from passes.context import PassContext
from passes.errors import StepFailed, StepTimedOut
from passes.graph.index import copy_of
from passes.graph.inference import types_of
from passes.graph.traversal import producers_read
from passes.model.analysis import extract_nodes
from passes.model.canonical import canonical_digest
from passes.model.signature import keep_signature
from passes.policy.policy import DESTROYS
from passes.provenance import carry
from passes.rewrites.fold_constants import FoldConstants
from passes.run.apply_step import apply_step
from passes.run.narrow import minimal_culprits, primary_culprit
from passes.run.reproduce import smallest
from passes.step import PassResult, Repeat, Step
from passes.structures.view import GraphView
from passes.suggest import plural
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
    """The step that shows the fault, which `before` does not show yet. `index` counts the steps of the recipe from 0,
    `turn` the rounds of a repeat from 1."""

    step: Step
    index: int
    turn: int
    before: DetachedModel
    outcome: StepOutcome
    sighting: Sighting


def find_guilty(
    blocks: Sequence[Repeat], source: DetachedModel, fault: Fault, runs: Runs
) -> tuple[GuiltyStep | None, tuple[str, ...]]:
    """The first step after which the model shows `fault`, and the steps before it that fail and were left out."""
    model, first, failed = source, 0, []
    total = sum(len(block.steps) for block in blocks)
    for block in blocks:
        for turn in range(1, block.limit + 1):
            begun_with = model
            for index, step in enumerate(block.steps, first):
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
        first += len(block.steps)
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


def find_smallest(
    guilty: GuiltyStep, inner: InnerCulprit, source: DetachedModel, fault: Fault, runs: Runs, budget_s: float
) -> Reproduction | None:
    """A part of the model before the guilty step on which that step alone shows the fault, and the outcome.

    None if the step does not show the fault by itself even on the whole model.

    Nodes have their names from `source`. The search ends after `budget_s`. Of a composite step only the pass at fault
    runs at first, which is much quicker; the final model has to show the fault with all passes.
    """
    whole = _with_names_of(source, guilty.before)
    alone = fault.of_one_step(guilty.before, guilty.outcome)
    deadline = time.monotonic() + budget_s
    at_fault = alone.locate(whole, guilty.outcome)
    focused = _focus(guilty.step, inner, runs)
    if focused is not None:
        half = deadline - budget_s / 2  # the rest is for the step as it is, where the pass alone does not prove enough
        quick, proof = _Search(focused, alone, runs, half, budget_s), _Search(guilty.step, alone, runs, math.inf)
        begun = find_neighbourhood(whole, at_fault, quick.shows)
        if begun is not None and proof.shows(_minimize(begun, quick, half)):
            return proof.last
    search = _Search(guilty.step, alone, runs, deadline, budget_s)
    begun = find_neighbourhood(whole, at_fault, search.shows)
    if begun is not None:
        _minimize(begun, search, deadline)
    return search.last


def _minimize(begun: DetachedModel, search: _Search, deadline: float) -> DetachedModel:
    """The smallest part of `begun`, with constants folded first if it then still shows the fault."""
    try:
        folded = FoldConstants().apply(begun, search.runs.context)
    except StepFailed:
        folded = PassResult(begun, changed=False)
    start = folded.model if folded.changed and search.shows(folded.model) else begun
    return smallest(start, search.shows, deadline, shorten=True)


@dataclass(frozen=True, slots=True)
class Reproduction:
    """A model that shows the fault, and the outcome of the step on it."""

    model: DetachedModel
    outcome: StepOutcome


@dataclass(slots=True)
class _Search:
    """Tests models until the deadline: does `step` show `fault` on them? `last` is the last one on which it did."""

    step: Step
    fault: Fault
    runs: Runs
    deadline: float
    budget_s: float = 0
    """Seconds from the beginning to the deadline; 0 without a deadline."""
    last: Reproduction | None = None

    def shows(self, part: DetachedModel) -> bool:
        tried: list[StepOutcome] = []

        def run(model: DetachedModel) -> StepOutcome:
            tried.append(self.runs.run(self.step, model))
            return tried[-1]

        spent = self.budget_s - (self.deadline - time.monotonic()) if self.budget_s else 0
        smallest_so_far = part if self.last is None else self.last.model
        left = f"{plural(len(smallest_so_far.proto.graph.node), 'node')} left"
        self.runs.observer("making the model smaller", left, spent, self.budget_s)
        if time.monotonic() > self.deadline or not self.fault.reproduces(part, run):
            return False
        self.last = Reproduction(part, tried[-1])
        return True


def _focus(step: Step, inner: InnerCulprit, runs: Runs) -> Step | None:
    """The composite step with only the pass at fault and its fixed stages; None if the pass is not known."""
    if not step.is_composite or not inner.primary:
        return None
    return step.without([name for name in step.inner(runs.context) if name not in (inner.primary, *step.suspects)])


def _with_names_of(before: DetachedModel, after: DetachedModel) -> DetachedModel:
    """A copy of `after` whose nodes have the names and metadata that they have in `before`."""
    if after is before:
        return after
    copy = copy_of(after.proto)
    return carry(before, after.with_proto(copy), "earlier passes")


HOPS: Final = range(2, 13)
"""Radii, in nodes, of the parts to try. Most parts are refused without a run, as an input lacks a type."""


def find_neighbourhood(
    model: DetachedModel, values: Collection[str], shows: Callable[[DetachedModel], bool]
) -> DetachedModel | None:
    """The smallest part of `model` around the producers of `values` on which `shows` holds; else `model`, else None."""
    types = types_of(model.proto) if values else {}
    for chosen in _around(model, values):
        if len(chosen) == len(model.proto.graph.node):
            break
        part = extract_nodes(model, [model.proto.graph.node[index] for index in sorted(chosen)], types)
        if part is not None and shows(part):
            return part
    return model if shows(model) else None


def _around(model: DetachedModel, values: Collection[str]) -> Iterator[set[int]]:
    """Growing sets of node positions around the producers of `values`, each with the constants that its nodes read.

    The walk does not cross constants, which many parts of a model share.
    """
    view = GraphView(model)
    nodes, positions = view.nodes, view.positions
    folded = {index for index, node in enumerate(nodes) if view.folded.issuperset(node.output)}
    before = producers_read(nodes)
    neighbours: dict[int, set[int]] = defaultdict(set)
    for index in set(range(len(nodes))) - folded:
        for producer in before[index] - folded:
            neighbours[index].add(producer)
            neighbours[producer].add(index)
    chosen = {positions[name] for name in values if name in positions}
    for hop in range(1, HOPS[-1] + 1 if chosen else 0):
        chosen = chosen.union(*(neighbours[index] for index in chosen))
        if hop in HOPS:
            yield _with_constants(chosen, before, folded)


def _with_constants(chosen: set[int], before: Sequence[set[int]], folded: set[int]) -> set[int]:
    whole, front = set(chosen), set(chosen)
    while front:
        front = set().union(*(before[index] & folded for index in front)) - whole
        whole |= front
    return whole
