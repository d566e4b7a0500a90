"""One digest per meaning: graphs that differ in names, metadata or the order of independent nodes digest the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from onnx import AttributeProto, GraphProto, NodeProto, TensorProto

from passes.weights import DetachedModel

RANDOM_OPS: Final = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial", "Dropout"}
)
"""Ops whose value is another one each time."""

__all__ = ["RANDOM_OPS", "canonical_digest", "live_digest"]


def canonical_digest(model: DetachedModel) -> str:
    """A digest of what the model computes: ops, attributes, wiring and values, seen from inputs and outputs.

    Every value is named by what it is computed from, so names and order drop out. Dead nodes and unused initializers
    count by what they are, since removing them is a change.
    """
    return _hash(_header(model), _graph_digest(model.proto.graph, model, {}, live=False))


def live_digest(model: DetachedModel) -> str:
    """A digest of what the outputs are computed from, and nothing else.

    Dead code does not count, an Identity is what it reads, and a Constant node is an initializer. Two models of the
    same live digest run the same operators on the same values, so their outputs are equal bit for bit and need no
    comparison.
    """
    return _hash(_header(model), _graph_digest(model.proto.graph, model, {}, live=True))


def _header(model: DetachedModel) -> str:
    opsets = sorted((entry.domain, entry.version) for entry in model.proto.opset_import)
    functions = sorted(function.SerializeToString(deterministic=True).hex() for function in model.proto.functions)
    return _hash(opsets, functions)


def _graph_digest(graph: GraphProto, model: DetachedModel, outer: dict[str, str], *, live: bool) -> str:
    meaning = dict(outer)
    meaning[""] = "absent"
    for index, info in enumerate(graph.input):
        # Names of graph inputs and outputs are the model's signature, so they count.
        meaning[info.name] = _hash("input", index, info.name, info.type.SerializeToString(deterministic=True).hex())
    initializers = []
    for tensor in graph.initializer:
        meaning[tensor.name] = _tensor_digest(tensor, model)
        initializers.append(meaning[tensor.name])
    for sparse in graph.sparse_initializer:
        meaning[sparse.values.name] = _hash("sparse", sparse.SerializeToString(deterministic=True).hex())
        initializers.append(meaning[sparse.values.name])
    nodes = []
    for place, node in enumerate(graph.node):
        if live and node.domain == "" and _is_transparent(node):
            meaning[node.output[0]] = _seen_through(node, model, meaning)
            continue
        digest = _node_digest(node, model, meaning, live=live)
        if node.op_type in RANDOM_OPS:
            digest = _hash(digest, place)  # two of them are two draws, although they look the same
        nodes.append(digest)
        for index, name in enumerate(node.output):
            if name:
                meaning[name] = _hash(digest, index)
    outputs = [(info.name, meaning.get(info.name, "missing")) for info in graph.output]
    if live:
        return _hash(outputs, [meaning[info.name] for info in graph.input])
    return _hash(
        sorted(initializers), sorted(nodes), outputs, [meaning[info.name] for info in graph.input], len(graph.input)
    )


def _is_transparent(node: NodeProto) -> bool:
    return node.op_type == "Identity" or (node.op_type == "Constant" and node.attribute[0].name == "value")


def _seen_through(node: NodeProto, model: DetachedModel, meaning: dict[str, str]) -> str:
    if node.op_type == "Identity":
        return meaning.get(node.input[0], node.input[0])
    return _tensor_digest(node.attribute[0].t, model)


def _node_digest(node: NodeProto, model: DetachedModel, meaning: dict[str, str], *, live: bool) -> str:
    attributes = sorted((one.name, _attribute(one, model, meaning, live=live)) for one in node.attribute)
    inputs = [meaning.get(name, name) for name in node.input]
    return _hash(node.domain, node.op_type, attributes, inputs, [bool(name) for name in node.output])


def _attribute(attribute: AttributeProto, model: DetachedModel, meaning: dict[str, str], *, live: bool) -> str:
    graphs: Iterable[GraphProto] = (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs)
    inner = [_graph_digest(graph, model, meaning, live=live) for graph in graphs]
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
