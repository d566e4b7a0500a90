"""Bisect a recipe: find the step at fault, then the pass inside of it, then the smallest model."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Final

import onnx

from passes.bisect.faults import Fault, Loss, StepOutcome
from passes.bisect.result import Bisection, Culprit, Smallest
from passes.bisect.run_faults import Breakdown, Deviation
from passes.bisect.search import GuiltyStep, InnerCulprit, Observer, Runs, find_guilty, find_inner, find_smallest
from passes.context import PassContext, limit_runs, open_context
from passes.diff import compare_matched, match_models
from passes.diff.types import label_of
from passes.errors import UsageError, check_arguments, is_number
from passes.graph.index import copy_of, replace_entries
from passes.model.analysis import what_is_invalid
from passes.model.signature import fill_in_outputs, free_initializers
from passes.optimize import read_source
from passes.policy.policy import Policy, check_lists
from passes.recipe import DEFAULT_RECIPE
from passes.recipe.recipe import RecipeItem, pass_names, steps_of
from passes.run.apply_step import with_skips
from passes.step import Repeat, Step
from passes.visible import write_to_stderr
from passes.weights.detached import DetachedModel

BUDGET_S: Final = 60.0
"""Seconds to spend on making the model smaller."""


def bisect(
    model: DetachedModel | onnx.ModelProto | str | Path,
    recipe: Sequence[RecipeItem | Step | Repeat] = DEFAULT_RECIPE,
    fault: Fault | None = None,
    context: PassContext | None = None,
    *,
    lost: str | None = None,
    error: float | None = None,
    skip: Sequence[str] = (),
    budget_s: float = BUDGET_S,
    timeout_s: float = 600.0,
    memory_gib: float | None = None,
    progress: bool | None = None,
    observer: Observer = lambda *_: None,
) -> Bisection:
    """Find the first pass of `recipe` after which the model shows a fault, and the smallest model that shows it.

    The recipe runs as its libraries run it: nothing is kept, pinned or reverted. The fault is what `lost`, `error` or
    `fault` says; without these, a step that crashes, hangs, fails, or makes a model that does not run.

    Args:
        model: left as it is; a path may have external data next to it.
        recipe: names of passes and mappings of a name to its options, as for `onnxline.optimize`, or ready steps.
        fault: a `Loss`, `Deviation` or `Breakdown` of this model, or a fault of your own.
        context: the workers to use, from `open_context`; by default they start and end with the call.
        lost: the kind of a structure whose loss is looked for, such as `qkv` or `op:Softmax`.
        error: the largest absolute error of an output, in the output's own unit, that is no fault yet.
        skip: passes, groups and globs to leave out, as in a policy.
        budget_s: seconds to spend on making the model smaller; 0 to skip that.
        timeout_s: seconds for one call of native code, if `context` is not given.
        memory_gib: GiB that one worker process may allocate, if `context` is not given; None for nine tenths of the
            machine's memory.
        progress: None writes a line on standard error for each part of the work on a terminal and in a notebook; True
            elsewhere too; False nowhere.
        observer: is called with the progress, as (activity, its subject, steps done, steps in all).

    Returns:
        A Bisection; `print` shows its first lines, and `bisection_text` all of them.

    Raises:
        ModelError: the model cannot be read, or for `error` does not run.
        PolicyError: an unknown name in `recipe` or `skip`, an option that a step does not take, or a structure that the
            model does not have.
        UsageError: a value that an argument cannot have, or several faults at once.

    Example:
        >>> from onnxline.bisect import bisect
        >>> finding = bisect("model.onnx", ["eliminate_identity", "fuse_qkv"], lost="qkv", progress=False)
        >>> finding.culprit.name
        'fuse_qkv'
    """
    check_lists(recipe=recipe, skip=skip)
    _check_arguments(fault, context, budget_s, progress, observer)
    if sum(wish is not None for wish in (fault, lost, error)) > 1:
        raise UsageError("bisect looks for one fault at a time; give one of fault, lost and error")
    with nullcontext(context) if context else open_context(timeout_s, memory_gib) as context, context.turn:
        source = read_source(model, context)
        source = source.without_functions() if source.has_layers() else source
        source = fill_in_outputs(free_initializers(source))  # as a run does: else onnxsim refuses the model as a whole
        steps = [
            step
            for item in recipe
            for step in ([item] if isinstance(item, Step | Repeat) else steps_of([item], context.user_code))
        ]
        with limit_runs(context, source):
            fault = fault or _fault(lost, error, source, context)
            runs = Runs(context, _with_lines(progress, observer))
            return _bisect(source, steps, fault, Policy(tuple(skip), watch=False), budget_s, runs)


def _check_arguments(fault: object, context: object, budget_s: object, progress: object, observer: object) -> None:
    check_arguments(
        ("fault", fault, fault is None or isinstance(fault, Fault), "a Loss, Deviation or Breakdown, or None"),
        ("context", context, context is None or isinstance(context, PassContext), "what open_context gives, or None"),
        ("budget_s", budget_s, is_number(budget_s) and budget_s >= 0, "seconds, 0 or more"),
        ("progress", progress, progress is None or isinstance(progress, bool), "True, False or None"),
        ("observer", observer, callable(observer), "a function"),
    )


def _fault(lost: str | None, error: float | None, source: DetachedModel, context: PassContext) -> Fault:
    if lost is not None:
        return Loss.of(lost, source)
    return Breakdown.of(source, context) if error is None else Deviation.of(error, source, context)


def _with_lines(progress: bool | None, observer: Observer) -> Observer:
    """`observer`, and a line on standard error for each part of the work, if `progress` asks for lines."""
    in_notebook = "ipykernel" in sys.modules
    if not (progress or (progress is None and (in_notebook or sys.stderr.isatty()))):
        return observer
    said: list[str] = []

    def observe(activity: str, subject: str, done: float, total: float) -> None:
        if said[-1:] != [activity]:
            said.append(activity)
            write_to_stderr(f"bisect: {activity}")
        observer(activity, subject, done, total)

    return observe


def _bisect(
    source: DetachedModel, recipe: Sequence[Step | Repeat], fault: Fault, policy: Policy, budget_s: float, runs: Runs
) -> Bisection:
    begun = time.perf_counter()
    blocks = [item if isinstance(item, Repeat) else Repeat((item,), limit=1) for item in recipe]
    blocks = _without_skipped(blocks, policy, runs.context)
    steps = sum(len(block.steps) for block in blocks)
    guilty, failed = find_guilty(blocks, source, fault, runs)
    if guilty is None:
        seconds = time.perf_counter() - begun
        return Bisection(fault.description, steps, None, None, fault.not_found_message, runs.count, seconds, failed)
    inner = find_inner(guilty, fault, runs)
    culprit = _build_culprit(guilty, inner, fault, _repeats(blocks, guilty.index))
    count, named = runs.count, time.perf_counter()
    smallest = _smallest(guilty, inner, source, fault, runs, budget_s) if budget_s > 0 else None
    notes = tuple(filter(None, (_note_on_growing_error(culprit), _note_on_invalid_source(source, guilty))))
    return Bisection(fault.description, steps, culprit, smallest, "", count, named - begun, failed, notes)


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


def _repeats(blocks: Sequence[Repeat], index: int) -> bool:
    limits = [block.limit for block in blocks for _ in block.steps]
    return limits[index] > 1


def _build_culprit(guilty: GuiltyStep, inner: InnerCulprit, fault: Fault, repeats: bool) -> Culprit:
    sighting = guilty.sighting
    return Culprit(
        step=guilty.step.name,
        source=guilty.step.source,
        inner=inner.primary,
        others=inner.others,
        place=guilty.index + 1,
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
    """The nodes that the step adds and removes where the fault shows first."""
    if outcome.failure is not None:
        return Smallest(model, tuple(label_of(node) for node in model.proto.graph.node))
    matched = match_models(_live(model), _live(outcome.model))
    diff, nodes = compare_matched(matched), matched.nodes.before.items
    at_fault = set(fault.locate(model, outcome))
    here = [
        replacement
        for replacement, (olds, _) in zip(diff.replaced, matched.groups, strict=True)
        if any(not at_fault.isdisjoint(nodes[old].node.output) for old in olds)
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
    replace_entries(proto.graph.node, model.index.live[::-1])
    return model.with_proto(proto)
