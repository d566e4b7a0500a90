"""Hold values visible across a pass: a graph output cannot be fused over, whatever the pass is called."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from onnx import ValueInfoProto

from passes.reads import live_nodes
from passes.weights import DetachedModel

__all__ = ["pin", "unpin"]


def pin(model: DetachedModel, pins: Iterable[ValueInfoProto]) -> DetachedModel:
    """A copy of `model` in which each pinned value that still exists is a graph output.

    Pins carry types, since onnxsim refuses an output whose shape field is missing.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    graph = proto.graph
    taken = {output.name for output in graph.output}
    made = {name for node in graph.node for name in node.output}
    for info in pins:
        if info.name in made and info.name not in taken:
            taken.add(info.name)
            graph.output.append(info)
    return model.with_proto(proto)


def unpin(model: DetachedModel, outputs: Iterable[str]) -> DetachedModel:
    """Take the pins back: only `outputs`, the names of the model's own outputs, stay. Changes `model.proto`.

    Nodes that lived for nothing but a pin go with it. What was dead before stays: to remove it is a pass's work.
    """
    own = set(outputs)
    graph = model.proto.graph
    pinned = [output for output in graph.output if output.name not in own]
    if not pinned:
        return model
    held = {node.output[0] for node in live_nodes(graph)}
    stays = [output for output in graph.output if output.name in own]
    del graph.output[:]
    graph.output.extend(stays)
    held -= {node.output[0] for node in live_nodes(graph)}
    if held:
        nodes = [node for node in graph.node if node.output[0] not in held]
        del graph.node[:]
        graph.node.extend(nodes)
    known = {info.name for info in graph.value_info}
    graph.value_info.extend(info for info in pinned if info.name not in known and info.name not in held)
    return model
