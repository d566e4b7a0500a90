"""What a step could do with the second pins: products and their sums with a bias, cut out as a model of their own."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import NodeProto, ValueInfoProto

from passes.model.extraction import lead_in
from passes.weights.detached import DetachedModel

__all__ = ["corner_of"]


def corner_of(
    model: DetachedModel, first: Sequence[ValueInfoProto], second: Sequence[ValueInfoProto]
) -> DetachedModel | None:
    """The nodes that make `first` and `second` pins, and those that lay out a weight for them; pinned at the second.

    A step that leaves this as it is does no more to the model with the second pins than with the first. None when a
    value that is read from outside has no known type; then only trying tells.
    """
    graph = model.proto.graph
    made_by = {name: node for node in graph.node for name in node.output}
    wanted = [made_by[pin.name] for pin in (*first, *second) if pin.name in made_by]
    chosen = {id(node) for node in wanted} | {id(node) for node in _layouts(wanted, made_by)}
    nodes = [node for node in graph.node if id(node) in chosen]
    made = {name for node in nodes for name in node.output}
    read = list(dict.fromkeys(name for node in nodes for name in node.input if name and name not in made))
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
    part.graph.output.extend(pin for pin in second if pin.name in made)
    return model.with_proto(part)


def _layouts(nodes: Sequence[NodeProto], made_by: dict[str, NodeProto]) -> list[NodeProto]:
    """The nodes of one input, such as Transpose, in front of the second operands."""
    before = [made_by[node.input[1]] for node in nodes if len(node.input) > 1 and node.input[1] in made_by]
    return [node for node in before if len(node.input) == 1]
