"""The smallest model on which a step still crashes or runs past its time, saved so that its authors can be told."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import onnx
from onnx import NodeProto, ValueInfoProto

from passes.base import Step, Workbench
from passes.errors import StepFailed
from passes.files import save
from passes.reads import reads_of
from passes.weights import DetachedModel

__all__ = ["save_reproducer", "smallest"]

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
            return failure.status == status or {failure.status, status} <= BREAKDOWNS
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


def smallest(model: DetachedModel, fails: Callable[[DetachedModel], bool]) -> DetachedModel:
    """A part of `model` on which `fails` still holds, and of which no further piece can be taken away.

    Delta debugging over runs of neighbouring nodes (Zeller and Hildebrandt 2002, ddmin). What a part reads and does not
    make becomes an input, what it makes and does not read an output.
    """
    types = _types(model.proto)
    nodes = list(model.proto.graph.node)
    pieces = 2
    while len(nodes) > 1:
        length = -(-len(nodes) // pieces)
        for start in range(0, len(nodes), length):
            rest = nodes[:start] + nodes[start + length :]
            part = _part(model, rest, types)
            if part is not None and fails(part):
                nodes, pieces = rest, max(pieces - 1, 2)
                break
        else:
            if length == 1:
                break
            pieces = min(pieces * 2, len(nodes))
    return _part(model, nodes, types) or model


def _types(proto: onnx.ModelProto) -> dict[str, ValueInfoProto]:
    try:
        graph = onnx.shape_inference.infer_shapes(proto).graph
    except Exception:  # the model may be what breaks tools
        graph = proto.graph
    return {info.name: info for info in (*graph.input, *graph.value_info, *graph.output)}


def _part(model: DetachedModel, nodes: Sequence[NodeProto], types: dict[str, ValueInfoProto]) -> DetachedModel | None:
    """`nodes` as a model; None when an input or output of it has no known type."""
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
