"""Hold values visible across a pass: a graph output cannot be fused over, whatever the pass is called."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from onnx import ValueInfoProto

from passes.graph.traversal import live_nodes, reads_of
from passes.weights.detached import DetachedModel

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
    # A value is either; with both a model comes out of a pass other than it went in.
    doubled = [place for place, info in enumerate(graph.value_info) if info.name in taken]
    for place in reversed(doubled):
        del graph.value_info[place]
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
    stays = [output for output in graph.output if output.name in own]
    del graph.output[:]
    graph.output.extend(stays)
    let_go = _let_go(graph, {output.name for output in pinned})
    for place in sorted(let_go, reverse=True):
        del graph.node[place]
    made = {name for node in graph.node for name in node.output} if let_go else set()
    known = {info.name for info in graph.value_info}
    graph.value_info.extend(info for info in pinned if info.name not in known and (not let_go or info.name in made))
    return model


def _let_go(graph: onnx.GraphProto, pinned: set[str]) -> list[int]:
    """The places of the nodes that lived for `pinned` alone, which are no outputs any more."""
    live = live_nodes(graph)
    known = {id(node) for node in live}
    dead = [(place, node) for place, node in enumerate(graph.node) if id(node) not in known]
    found = []
    for place, node in reversed(dead):
        if pinned.intersection(node.output):
            found.append(place)
            pinned.update(reads_of(node))
    return found
