"""The smallest model on which a step still crashes or runs past its time, saved so that its authors can be told."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import onnx
from onnx import NodeProto, ValueInfoProto

from passes.base import Step, Workbench
from passes.errors import StepFailed
from passes.files import save
from passes.reads import reads_of
from passes.shorten import shortened
from passes.weights import DetachedModel

__all__ = ["is_same_failure", "part_of", "save_reproducer", "smallest", "types_of"]

BUDGET_S: Final = 60.0
"""Seconds for making a model smaller; each try may cost a worker."""

BREAKDOWNS: Final = frozenset({"crashed", "timed_out"})


def save_reproducer(step: Step, model: DetachedModel, bench: Workbench, folder: Path, status: str) -> str:
    """Write the smallest part of `model` on which `step` still ends as it did to `folder`, and return its name.

    `status` is that of the failure. When a crash does not come again, the whole model is written; when an error does
    not, it was none of the step's own, and nothing is.
    """
    deadline = time.monotonic() + BUDGET_S

    def fails(part: DetachedModel) -> bool:
        if time.monotonic() > deadline:
            return False
        try:
            step.apply(part, bench)
        except StepFailed as failure:
            return is_same_failure(failure.status, status)
        return False

    comes_again = fails(model)
    if not comes_again and status not in BREAKDOWNS:
        return ""
    part = smallest(model, fails) if comes_again else model
    path = folder / f"{step.name.replace('/', '-')}.onnx"
    try:
        save(part, path)
    except OSError:  # a reproducer that cannot be written must not cost the run
        return ""
    return path.name


def is_same_failure(status: str, other: str) -> bool:
    """Whether a step ended alike twice: what crashes once may run past its time on another model."""
    return status == other or {status, other} <= BREAKDOWNS


def smallest(model: DetachedModel, fails: Callable[[DetachedModel], bool], *, shorten: bool = False) -> DetachedModel:
    """A part of `model` on which `fails` still holds, and of which no further piece can be taken away.

    Delta debugging over runs of neighbouring nodes (Zeller and Hildebrandt 2002, ddmin). What a part reads and does not
    make becomes an input, what it makes and does not read an output.

    Args:
        shorten: also take nodes out of the middle, by handing on what they read; the result is then a valid model that
            may compute something else than its place in `model` did.
    """
    part = _cut(model, fails)
    while shorten:
        shorter = _shorter(part, fails)
        if shorter is part:
            break
        part = _cut(shorter, fails)
    return part


def _shorter(model: DetachedModel, fails: Callable[[DetachedModel], bool]) -> DetachedModel:
    """`model` without nodes in the middle of it; the very same object when none can go."""
    while (shorter := next((one for one in shortened(model) if fails(one)), None)) is not None:
        model = shorter
    return model


def _cut(model: DetachedModel, fails: Callable[[DetachedModel], bool]) -> DetachedModel:
    """`smallest`, by taking whole runs of nodes away, shorter and shorter ones. Of several places that fail, the first
    one stays, since the last nodes go first."""
    types = types_of(model.proto)
    nodes, length = list(model.proto.graph.node), len(model.proto.graph.node)
    count = 0
    while length > 1 or len(nodes) < count:
        count, length = len(nodes), -(-length // 2)
        for start in reversed(range(0, count, length)):
            rest = nodes[:start] + nodes[start + length :]
            part = part_of(model, rest, types) if rest else None
            if part is not None and fails(part):
                nodes = rest
    return part_of(model, nodes, types) or model


def types_of(proto: onnx.ModelProto) -> dict[str, ValueInfoProto]:
    """The types of values, by name, as far as they are declared or can be inferred."""
    try:
        graph = onnx.shape_inference.infer_shapes(proto).graph
    except Exception:  # the model may be what breaks tools
        graph = proto.graph
    return {info.name: info for info in (*graph.input, *graph.value_info, *graph.output)}


def part_of(
    model: DetachedModel, nodes: Sequence[NodeProto], types: Mapping[str, ValueInfoProto]
) -> DetachedModel | None:
    """`nodes` of `model` as a model of their own; None when an input or output of it has no known type."""
    source = model.proto
    made = [name for node in nodes for name in node.output if name]
    read = list(dict.fromkeys(name for node in nodes for name in reads_of(node)))
    stored = {tensor.name: tensor for tensor in source.graph.initializer}
    inputs = [name for name in read if name not in made and name not in stored]
    own = {output.name for output in source.graph.output}
    outputs = [name for name in made if name in own or name not in read]
    if not outputs or any(name not in types for name in (*inputs, *outputs)):
        return None
    proto = onnx.ModelProto(ir_version=source.ir_version, opset_import=source.opset_import)
    proto.functions.extend(source.functions)
    proto.graph.name = "reproducer"
    proto.graph.node.extend(nodes)
    proto.graph.input.extend(types[name] for name in inputs)
    proto.graph.output.extend(types[name] for name in outputs)
    proto.graph.initializer.extend(stored[name] for name in read if name in stored)
    return model.with_proto(proto)
