"""Hold values visible across a pass: a graph output cannot be fused over, whatever the pass is called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx
from onnx import NodeProto, ValueInfoProto

from passes.graph.traversal import live_nodes, reads_of
from passes.model.defaults import hide_defaults
from passes.model.extraction import lead_in
from passes.weights.detached import DetachedModel


def pin(model: DetachedModel, pins: Iterable[ValueInfoProto]) -> DetachedModel:
    """A copy of `model` in which each pinned value that still exists is a graph output, and no input has a default.

    Pins carry types, since onnxsim refuses an output whose shape field is missing.
    """
    proto = model.copy_proto()
    graph = proto.graph
    hide_defaults(graph)
    taken = {output.name for output in graph.output}
    computed = {name for node in graph.node for name in node.output}
    for info in pins:
        if info.name in computed and info.name not in taken:
            taken.add(info.name)
            graph.output.append(info)
    # A value is a graph output or in value_info; a pass would change a model in which it is both.
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
    freed = _nodes_only_for(graph, {output.name for output in pinned})
    for place in sorted(freed, reverse=True):
        del graph.node[place]
    computed = {name for node in graph.node for name in node.output} if freed else set()
    known = {info.name for info in graph.value_info}
    graph.value_info.extend(info for info in pinned if info.name not in known and (not freed or info.name in computed))
    return model


def _nodes_only_for(graph: onnx.GraphProto, pinned: set[str]) -> list[int]:
    """The places of the nodes that lived for `pinned` alone, which are no outputs any more."""
    live = live_nodes(graph)
    known = {id(node) for node in live}
    dead = [(place, node) for place, node in enumerate(graph.node) if id(node) not in known]
    freed = []
    for place, node in reversed(dead):
        if pinned.intersection(node.output):
            freed.append(place)
            pinned.update(reads_of(node))
    return freed


def build_pin_probe(
    model: DetachedModel, first: Sequence[ValueInfoProto], second: Sequence[ValueInfoProto]
) -> DetachedModel | None:
    """A model of the nodes that make `first` and `second` pins, and lay out their weights; pinned at the second.

    A step that does not change it does no more to the whole model with the second pins than with the first. None when
    a value that is read from outside has no known type; then the step has to be tried.
    """
    graph = model.proto.graph
    made_by = {name: node for node in graph.node for name in node.output}
    wanted = [made_by[pin.name] for pin in (*first, *second) if pin.name in made_by]
    chosen = {id(node) for node in wanted} | {id(node) for node in _layouts(wanted, made_by)}
    nodes = [node for node in graph.node if id(node) in chosen]
    computed = {name for node in nodes for name in node.output}
    read = list(dict.fromkeys(name for node in nodes for name in node.input if name and name not in computed))
    stored = {tensor.name: tensor for tensor in graph.initializer}
    types = {info.name: info for info in (*graph.input, *graph.value_info, *graph.output)}
    outside = [name for name in read if name not in stored]
    if any(name not in types for name in outside):
        return None
    part = onnx.ModelProto(ir_version=model.proto.ir_version, opset_import=model.proto.opset_import)
    part.graph.name = "corner"
    for name in outside:
        lead_in(part, types[name])
    part.graph.node.extend(nodes)
    part.graph.initializer.extend(stored[name] for name in read if name in stored)
    part.graph.output.extend(pin for pin in second if pin.name in computed)
    return model.with_proto(part)


def _layouts(nodes: Sequence[NodeProto], made_by: dict[str, NodeProto]) -> list[NodeProto]:
    """The nodes of one input, such as Transpose, in front of the second operands."""
    before = [made_by[node.input[1]] for node in nodes if len(node.input) > 1 and node.input[1] in made_by]
    return [node for node in before if len(node.input) == 1]
