"""Save the smallest model on which a step still crashes or runs past its time, for a report to its authors."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from onnx import ModelProto

from passes.context import PassContext
from passes.errors import StepFailed
from passes.graph.index import copy_of, extract, replace_all_uses_with, replace_entries
from passes.graph.inference import InferenceError, infer_shapes, types_of
from passes.graph.traversal import live_nodes, read_names
from passes.model.analysis import extract_nodes, what_is_invalid
from passes.step import Step
from passes.weights.detached import DetachedModel
from passes.weights.files import save

BUDGET_S: Final = 60.0
"""Seconds for making a model smaller; each try may cost a worker."""

BREAKDOWNS: Final = frozenset({"crashed", "timed_out"})


def save_reproducer(step: Step, model: DetachedModel, context: PassContext, folder: Path, status: str) -> str:
    """Write the smallest part of `model` on which `step` still ends as it did to `folder`, and return its name.

    `status` is that of the failure. A crash that does not happen again leaves the whole model; an error that does not
    was not the step's own, and nothing is written.
    """
    deadline = time.monotonic() + BUDGET_S

    def fails(part: DetachedModel) -> bool:
        try:
            step.apply(part, context)
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
    """Whether two failures are the same: a step that crashes on one model may time out on a smaller one."""
    return status == other or {status, other} <= BREAKDOWNS


def smallest(
    model: DetachedModel, fails: Callable[[DetachedModel], bool], deadline: float = math.inf, *, shorten: bool = False
) -> DetachedModel:
    """A part of `model` on which `fails` still holds, and from which no further piece can be removed.

    Delta debugging over runs of neighbouring nodes (Zeller and Hildebrandt 2002, ddmin). What a part reads and does not
    make becomes an input, what it makes and does not read an output.

    Args:
        model: a model on which `fails` holds.
        fails: whether a part of the model shows the failure.
        deadline: a time of `time.monotonic`, at which the result is what was found so far.
        shorten: also take nodes out of the middle, by handing on what they read; the result is then a valid model that
            may compute something else than its place in `model` did.
    """

    def still(part: DetachedModel) -> bool:
        return time.monotonic() <= deadline and fails(part)

    part = _sweep(model, still, deadline)
    while shorten:
        shorter = part
        while (
            next_one := next((candidate for candidate in bypass_nodes(shorter) if still(candidate)), None)
        ) is not None:
            shorter = next_one
        if shorter is part:
            break
        part = _sweep(shorter, still, deadline)
    return part


def _sweep(model: DetachedModel, fails: Callable[[DetachedModel], bool], deadline: float) -> DetachedModel:
    """`model` without runs of nodes that the failure does not need; first long runs, then shorter ones.

    The last nodes are tried first, so of several nodes that fail the first stays.
    """
    types = types_of(model.proto)
    nodes, length = list(model.proto.graph.node), len(model.proto.graph.node)
    count = 0
    while length > 1 or len(nodes) < count:
        count, length = len(nodes), -(-length // 2)
        for start in reversed(range(0, count, length)):
            if time.monotonic() > deadline:  # to cut a large model takes time as well
                return extract_nodes(model, nodes, types) or model
            rest = nodes[:start] + nodes[start + length :]
            part = extract_nodes(model, rest, types) if rest else None
            if part is not None and fails(part):
                nodes = rest
    return extract_nodes(model, nodes, types) or model


def bypass_nodes(model: DetachedModel) -> Iterator[DetachedModel]:
    """Valid models that lack one node of `model`, or two in a row such as a Reshape and a Transpose: the consumers of
    the last node read an input of the first node.

    The types of outputs are inferred again, and values that nothing reads any more are removed.
    """
    graph = model.proto.graph
    index = model.index
    for node in index.nodes:
        if not index.outputs.keys().isdisjoint(node.output):
            continue
        near = [name for name in node.input if name]
        far = [name for value in near if value in index.producers for name in index.producers[value].input if name]
        for name in dict.fromkeys((*near, *far)):
            shorter = model.with_proto(_without(model.proto, node.output[0], name))
            # A node whose other outputs are read stays: then nothing is shorter, however often that is tried.
            if len(shorter.proto.graph.node) < len(graph.node) and _is_sound(shorter):
                yield shorter


def _without(source: ModelProto, value: str, name: str) -> ModelProto:
    """`source`, in which `name` is read in place of `value`."""
    proto = copy_of(source)
    replace_all_uses_with(proto.graph.node, {value: name})
    nodes = live_nodes(proto.graph)[::-1]
    read = read_names(nodes)
    inputs = [info for info in proto.graph.input if info.name in read]
    proto.graph.CopyFrom(extract(proto, nodes, inputs=inputs, outputs=[info.name for info in proto.graph.output]).graph)
    return proto


def _is_sound(model: DetachedModel) -> bool:
    """Whether all types fit together; gives the outputs theirs."""
    try:
        inferred = infer_shapes(model.proto, check_type=True, strict_mode=True).graph
    except (InferenceError, StepFailed):
        return False
    if not all(info.type.tensor_type.HasField("shape") for info in inferred.output):
        return False
    replace_entries(model.proto.graph.output, inferred.output)
    return not what_is_invalid(model)
