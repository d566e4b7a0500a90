"""Hold values visible across a pass: a graph output cannot be fused over, whatever the pass is called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx
from onnx import NodeProto, TensorProto, ValueInfoProto

from passes.graph.index import GraphIndex, computed_values, extract, values_read
from passes.graph.traversal import live_nodes, reads_of
from passes.model.signature import hide_defaults
from passes.weights.detached import DetachedModel


def pin(model: DetachedModel, pins: Iterable[ValueInfoProto]) -> DetachedModel:
    """A copy of `model` in which each pinned value that still exists is a graph output, and no input has a default.

    Pins carry types, since onnxsim refuses an output whose shape field is missing.
    """
    proto = model.copy_proto()
    graph = proto.graph
    hide_defaults(graph)
    index = GraphIndex(graph)
    taken = {*index.outputs}
    for info in pins:
        if info.name in index.producers and info.name not in taken:
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
    computed = computed_values(graph.node) if freed else {}
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

    If a step leaves this probe unchanged, the second pins allow no further change in the whole model. None when
    a value that is read from outside has no known type; then the step has to be tried.
    """
    index = model.index
    wanted = [index.producers[pin.name] for pin in (*first, *second) if pin.name in index.producers]
    chosen = {id(node) for node in (*wanted, *_layouts(wanted, index.producers))}
    nodes = [node for node in index.nodes if id(node) in chosen]
    read = values_read(nodes)
    outside = [name for name in read if name not in index.initializers]
    if any(name not in index.types for name in outside):
        return None
    computed = computed_values(nodes)
    stored = [index.initializers[name] for name in read if name in index.initializers]
    part = extract(model.proto, [], outputs=[pin for pin in second if pin.name in computed], initializers=stored)
    for name in outside:
        _lead_in(part, index.types[name])
    part.graph.node.extend(nodes)
    return model.with_proto(part)


def _lead_in(part: onnx.ModelProto, info: ValueInfoProto) -> None:
    """Add an input to `part`, and a node that computes the value `info` from it, as a node did in the source model.

    `info` itself does not become an input: onnxoptimizer's fuse_qkv aborts where three products read one input.
    """
    entry = part.graph.input.add()
    entry.CopyFrom(info)
    entry.name = f"outside/{info.name}"
    op = "Not" if info.type.tensor_type.elem_type == TensorProto.BOOL else "Neg"
    part.graph.node.add(op_type=op, input=[entry.name], output=[info.name])
    part.graph.value_info.append(info)


def _layouts(nodes: Sequence[NodeProto], made_by: dict[str, NodeProto]) -> list[NodeProto]:
    """The nodes with one input, such as Transpose, that produce the second operands."""
    before = [made_by[node.input[1]] for node in nodes if len(node.input) > 1 and node.input[1] in made_by]
    return [node for node in before if len(node.input) == 1]
