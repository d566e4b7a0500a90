"""The smallest model on which a step still crashes or runs past its time, saved so that its authors can be told."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from passes.context import PassContext
from passes.errors import StepFailed
from passes.model.cut import cut, types_of
from passes.model.files import save
from passes.model.weights import DetachedModel
from passes.run.bypass import shortened
from passes.step import Step

__all__ = ["is_same_failure", "save_reproducer", "smallest"]

BUDGET_S: Final = 60.0
"""Seconds for making a model smaller; each try may cost a worker."""

BREAKDOWNS: Final = frozenset({"crashed", "timed_out"})


def save_reproducer(step: Step, model: DetachedModel, bench: PassContext, folder: Path, status: str) -> str:
    """Write the smallest part of `model` on which `step` still ends as it did to `folder`, and return its name.

    `status` is that of the failure. When a crash does not come again, the whole model is written; when an error does
    not, it was none of the step's own, and nothing is.
    """
    deadline = time.monotonic() + BUDGET_S

    def fails(part: DetachedModel) -> bool:
        try:
            step.apply(part, bench)
        except StepFailed as failure:
            return is_same_failure(failure.status, status)
        return False

    comes_again = fails(model)
    if not comes_again and status not in BREAKDOWNS:
        return ""
    part = smallest(model, fails, deadline) if comes_again else model
    path = folder / f"{step.name.replace('/', '-')}.onnx"
    try:
        save(part, path)
    except OSError:  # a reproducer that cannot be written must not cost the run
        return ""
    return path.name


def is_same_failure(status: str, other: str) -> bool:
    """Whether a step ended alike twice: what crashes once may run past its time on another model."""
    return status == other or {status, other} <= BREAKDOWNS


def smallest(
    model: DetachedModel,
    fails: Callable[[DetachedModel], bool],
    deadline: float = math.inf,
    *,
    shorten: bool = False,
) -> DetachedModel:
    """A part of `model` on which `fails` still holds, and of which no further piece can be taken away.

    Delta debugging over runs of neighbouring nodes (Zeller and Hildebrandt 2002, ddmin). What a part reads and does not
    make becomes an input, what it makes and does not read an output.

    Args:
        deadline: a time of `time.monotonic`, at which the result is what was found so far.
        shorten: also take nodes out of the middle, by handing on what they read; the result is then a valid model that
            may compute something else than its place in `model` did.
    """

    def still(part: DetachedModel) -> bool:
        return time.monotonic() <= deadline and fails(part)

    part = _sweep(model, still, deadline)
    while shorten:
        shorter = _shorter(part, still)
        if shorter is part:
            break
        part = _sweep(shorter, still, deadline)
    return part


def _shorter(model: DetachedModel, fails: Callable[[DetachedModel], bool]) -> DetachedModel:
    """`model` without nodes in the middle of it; the very same object when none can go."""
    while (shorter := next((one for one in shortened(model) if fails(one)), None)) is not None:
        model = shorter
    return model


def _sweep(model: DetachedModel, fails: Callable[[DetachedModel], bool], deadline: float) -> DetachedModel:
    """`smallest`, by taking whole runs of nodes away, shorter and shorter ones. Of several places that fail, the first
    one stays, since the last nodes go first."""
    types = types_of(model.proto)
    nodes, length = list(model.proto.graph.node), len(model.proto.graph.node)
    count = 0
    while length > 1 or len(nodes) < count:
        count, length = len(nodes), -(-length // 2)
        for start in reversed(range(0, count, length)):
            if time.monotonic() > deadline:  # to cut a large model takes time as well
                return cut(model, nodes, types) or model
            rest = nodes[:start] + nodes[start + length :]
            part = cut(model, rest, types) if rest else None
            if part is not None and fails(part):
                nodes = rest
    return cut(model, nodes, types) or model
