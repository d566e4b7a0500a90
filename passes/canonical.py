"""One digest per meaning: two graphs that differ in names, node order of independent nodes, or metadata digest the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from onnx import AttributeProto, GraphProto, NodeProto, TensorProto

from passes.weights import DetachedModel

__all__ = ["canonical_digest"]


def canonical_digest(model: DetachedModel) -> str:
    """A digest of what the model computes: ops, attributes, wiring and values, seen from inputs and outputs.

    Every value is named by what it is computed from, so names and order drop out. Dead nodes and unused initializers
    count by what they are, since removing them is a change.
    """
    proto = model.proto
    head = hashlib.blake2b(digest_size=16)
    for entry in sorted((entry.domain, entry.version) for entry in proto.opset_import):
        head.update(repr(entry).encode())
    for function in sorted(proto.functions, key=lambda one: (one.domain, one.name)):
        head.update(function.SerializeToString(deterministic=True))
    head.update(_graph_digest(proto.graph, model, {}).encode())
    return head.hexdigest()


def _graph_digest(graph: GraphProto, model: DetachedModel, outer: dict[str, str]) -> str:
    meaning = dict(outer)
    meaning[""] = "absent"
    for index, info in enumerate(graph.input):
        # Names of graph inputs and outputs are the model's signature, so they count.
        meaning[info.name] = _hash("input", index, info.name, info.type.SerializeToString(deterministic=True).hex())
    initializers = []
    for tensor in graph.initializer:
        meaning[tensor.name] = _tensor_digest(tensor, model)
        initializers.append(meaning[tensor.name])
    nodes = []
    for node in graph.node:
        digest = _node_digest(node, model, meaning)
        nodes.append(digest)
        for index, name in enumerate(node.output):
            if name:
                meaning[name] = _hash(digest, index)
    outputs = [(info.name, meaning.get(info.name, "missing")) for info in graph.output]
    return _hash(
        sorted(initializers), sorted(nodes), outputs, [meaning[info.name] for info in graph.input], len(graph.input)
    )


def _node_digest(node: NodeProto, model: DetachedModel, meaning: dict[str, str]) -> str:
    attributes = sorted((attribute.name, _attribute(attribute, model, meaning)) for attribute in node.attribute)
    inputs = [meaning.get(name, name) for name in node.input]
    return _hash(node.domain, node.op_type, attributes, inputs, [bool(name) for name in node.output])


def _attribute(attribute: AttributeProto, model: DetachedModel, meaning: dict[str, str]) -> str:
    graphs: Iterable[GraphProto] = (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs)
    inner = [_graph_digest(graph, model, meaning) for graph in graphs]
    if inner:
        return _hash(inner)
    if attribute.HasField("t"):
        return _tensor_digest(attribute.t, model)
    bare = AttributeProto()
    bare.CopyFrom(attribute)
    bare.ClearField("doc_string")
    return bare.SerializeToString(deterministic=True).hex()


def _tensor_digest(tensor: TensorProto, model: DetachedModel) -> str:
    return _hash(list(tensor.dims), tensor.data_type, model.digest(tensor))


def _hash(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
