"""Runs of steps on workers that run already, and what tests ask of a run."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx

from passes import PassRow, PassRun
from passes.context import PassContext
from passes.optimize import draw_feeds
from passes.policy.policy import Policy
from passes.proof.numeric import NumericProver
from passes.recipe.recipe import RecipeItem, steps_of
from passes.run.runner import run_passes
from passes.weights.detached import DetachedModel, attach
from passes.weights.sharing import detached_copy


def optimized(
    context: PassContext,
    model: onnx.ModelProto,
    recipe: Sequence[RecipeItem],
    skip: Sequence[str] = (),
    keep: Sequence[str] = (),
    *,
    watch: bool = True,
    feeds: Sequence[Mapping[str, np.ndarray]] = (),
) -> PassRun:
    """`passes.optimize`, on workers that run already."""
    detached = detached_copy(model, context.spill)
    prover = NumericProver.of_itself(feeds or [draw_feeds(detached, 0)], context)
    return run_passes(detached, steps_of(recipe), Policy(tuple(skip), tuple(keep), watch), prover, context)


def ops(run: PassRun) -> Counter[str]:
    return Counter(node.op_type for node in run.model.proto.graph.node)


def row(run: PassRun, name: str) -> PassRow:
    return next(row for row in run.rows if row.name == name)


def broken(run: PassRun, kind: str = "qkv") -> list[tuple[bool, str | None]]:
    """Of each instance of `kind`: is it kept, and who broke it."""
    return [(verdict.kept, verdict.broken_by) for verdict in run.structures if verdict.kind == kind]


def valid(run: PassRun) -> bool:
    """Whether ONNX's checker takes the result; it raises where not."""
    onnx.checker.check_model(attach(run.model))
    return True


def models_left_by(work: Callable[[], object]) -> int:
    """How many models that `work` has made are still there after it, until Python's collector finds them.

    They are gigabytes, and the collector, which counts objects, does not come for them.
    """

    def count() -> int:
        return sum(type(known) is DetachedModel for known in gc.get_objects())  # asks no object, as isinstance would

    work()  # once before, for what is remembered
    gc.collect()
    gc.disable()
    try:
        before = count()
        work()
        return count() - before
    finally:
        gc.enable()
