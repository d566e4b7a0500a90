"""Bisect a recipe: find the step at fault, then the pass inside of it, then the smallest model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from passes.bisect.faults import Fault
from passes.bisect.replay import Observer, Runs, StepOutcome, join_blocks
from passes.bisect.result import Bisection, Culprit, Smallest
from passes.bisect.search import GuiltyStep, InnerCulprit, find_guilty, find_inner
from passes.bisect.smallest import find_smallest
from passes.catalog import pass_names
from passes.context import PassContext
from passes.diff import compare_matched, match_models
from passes.diff.types import label_of
from passes.graph.index import copy_of
from passes.graph.traversal import live_nodes
from passes.model.analysis import what_is_invalid
from passes.policy.policy import Policy, check_lists
from passes.run.apply_policy import with_skips
from passes.step import Repeat, Step
from passes.weights.detached import DetachedModel

BUDGET_S: Final = 60.0
"""Seconds to spend on making the model smaller."""


def bisect(
    source: DetachedModel,
    recipe: Sequence[Step | Repeat],
    fault: Fault,
    context: PassContext,
    *,
    skip: Sequence[str] = (),
    budget_s: float = BUDGET_S,
    observer: Observer = lambda *_: None,
) -> Bisection:
    """Find the first pass of `recipe` after which the model shows `fault`, and the smallest model that shows it.

    The recipe runs as its libraries run it: nothing is kept, pinned or reverted.

    Args:
        skip: passes, groups and globs to leave out, as in a policy.
        budget_s: seconds to spend on making the model smaller; 0 to skip that.
        observer: is called with the progress.

    Raises:
        PolicyError: an unknown name in `skip`, or an option that a step does not take.
    """
    check_lists(recipe=recipe, skip=skip)
    begun, runs = time.perf_counter(), Runs(context, observer)
    blocks = _without_skipped(join_blocks(recipe), Policy(tuple(skip), watch=False), context)
    steps = sum(len(block.steps) for block in blocks)
    guilty = find_guilty(blocks, source, fault, runs)
    if not isinstance(guilty, GuiltyStep):
        seconds = time.perf_counter() - begun
        return Bisection(
            fault.description, steps, None, None, fault.not_found_message, runs.count, seconds, guilty.failed
        )
    inner = find_inner(guilty, fault, runs)
    culprit = _build_culprit(guilty, inner, fault, _repeats(blocks, guilty.place))
    count, named = runs.count, time.perf_counter()
    smallest = _smallest(guilty, inner, source, fault, runs, budget_s) if budget_s > 0 else None
    notes = (guilty.note, _note_on_growing_error(culprit), _note_on_invalid_source(source, guilty))
    notes = tuple(note for note in notes if note)
    return Bisection(fault.description, steps, culprit, smallest, "", count, named - begun, guilty.failed, notes)


def _without_skipped(blocks: Sequence[Repeat], policy: Policy, context: PassContext) -> list[Repeat]:
    """The blocks without the steps and passes that `policy` skips."""
    if policy.skip:
        all_steps = [step for block in blocks for step in block.steps]
        policy.check(pass_names(all_steps, context), [step.name for step in all_steps])
    return [
        Repeat(
            tuple(with_skips(step, policy, context) for step in block.steps if policy.skips(step.name) is None),
            block.limit,
        )
        for block in blocks
    ]


def _repeats(blocks: Sequence[Repeat], place: int) -> bool:
    limits = [block.limit for block in blocks for _ in block.steps]
    return limits[place] > 1


def _build_culprit(guilty: GuiltyStep, inner: InnerCulprit, fault: Fault, repeats: bool) -> Culprit:
    sighting = guilty.sighting
    return Culprit(
        step=guilty.step.name,
        source=guilty.step.source,
        inner=inner.primary,
        others=inner.others,
        place=guilty.place + 1,
        turn=guilty.turn,
        repeats=repeats,
        why=sighting.why,
        lost=sighting.lost,
        error_before=fault.measure(guilty.before),
        error_after=sighting.error,
    )


def _note_on_growing_error(culprit: Culprit) -> str:
    """A note if passes before the culprit add to the error too; else empty."""
    before, after = culprit.error_before, culprit.error_after
    if before is None or after is None or before < after / 10:
        return ""
    return f"the error was {before:.3g} before it: passes before this one add to it too"


def _note_on_invalid_source(source: DetachedModel, guilty: GuiltyStep) -> str:
    """A note if a step fails and the source is itself not valid ONNX; else empty."""
    invalid = what_is_invalid(source) if guilty.outcome.failure is not None else ""
    return f"the model itself is not valid ONNX, which may be why: {invalid}" if invalid else ""


def _smallest(
    guilty: GuiltyStep, inner: InnerCulprit, source: DetachedModel, fault: Fault, runs: Runs, budget_s: float
) -> Smallest | None:
    begun, counted = time.perf_counter(), runs.count
    smallest = find_smallest(guilty, inner, source, fault, runs, budget_s)
    if smallest is None:
        return None
    described = _describe_smallest(smallest.model, smallest.outcome, fault)
    return replace(described, runs=runs.count - counted, seconds=time.perf_counter() - begun)


def _describe_smallest(model: DetachedModel, outcome: StepOutcome, fault: Fault) -> Smallest:
    """The nodes that the step adds and removes at the place of the fault."""
    if outcome.failure is not None:
        return Smallest(model, tuple(label_of(node) for node in model.proto.graph.node))
    matched = match_models(_live(model), _live(outcome.model))
    diff, nodes = compare_matched(matched), matched.same.before.items
    place = set(fault.place(model, outcome))
    here = [
        replacement
        for replacement, (olds, _) in zip(diff.replaced, matched.groups, strict=True)
        if any(not place.isdisjoint(nodes[old].node.output) for old in olds)
    ] or list(diff.replaced)
    # Tensors that come or go with nodes are not worth a line.
    stored = [change for change in diff.initializers if not diff.replaced or (change.before and change.after)]
    return Smallest(
        model,
        tuple(node for replacement in here for node in replacement.removed),
        tuple(node for replacement in here for node in replacement.added),
        (*map(str, (*diff.attributes, *diff.rewired)), *(f"initializer {change}" for change in stored)),
        len(diff.replaced) - len(here),
    )


def _live(model: DetachedModel) -> DetachedModel:
    """`model` without dead nodes, which some passes leave for another pass to remove."""
    proto = copy_of(model.proto)
    nodes = live_nodes(model.proto.graph)[::-1]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return model.with_proto(proto)
