"""One digest per meaning: graphs that differ in names, metadata or the order of independent nodes digest the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from onnx import AttributeProto, GraphProto, NodeProto, TensorProto

from passes.weights import DetachedModel

RANDOM_OPS: Final = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial", "Dropout"}
)
"""Ops whose value is another one each time."""

__all__ = ["RANDOM_OPS", "Meanings", "canonical_digest", "live_digest", "meanings_of"]


@dataclass(frozen=True, slots=True)
class Meanings:
    """What each value of a model is computed from, as a digest: equal digests are equal values, bit for bit.

    Dead code does not count, an Identity is what it reads, and a Constant node is an initializer. `whole` is the digest
    of all outputs.
    """

    values: Mapping[str, str]
    whole: str


Settle = Callable[[str, str], str]
"""Name of a node's output and its digest → the meaning that it is given."""


def _as_it_is(_: str, digest: str) -> str:
    return digest


def meanings_of(model: DetachedModel, settle: Settle = _as_it_is) -> Meanings:
    """The meaning of every value; `settle` may put one that is known to be an equal value in a meaning's place."""
    reader = _Reader(model, True, settle)
    meaning: dict[str, str] = {}
    whole = reader.graph(model.proto.graph, meaning)
    return Meanings(meaning, _hash(_header(model), whole))


def canonical_digest(model: DetachedModel) -> str:
    """A digest of what the model computes: ops, attributes, wiring and values, seen from inputs and outputs.

    Every value is named by what it is computed from, so names and order drop out. Dead nodes and unused initializers
    count by what they are, since removing them is a change.
    """
    return _hash(_header(model), _Reader(model, False, _as_it_is).graph(model.proto.graph, {}))


def live_digest(model: DetachedModel) -> str:
    """A digest of what the outputs are computed from, and nothing else.

    Two models of the same live digest run the same operators on the same values, so their outputs are equal bit for bit
    and need no comparison.
    """
    return meanings_of(model).whole


def _header(model: DetachedModel) -> str:
    opsets = sorted((entry.domain, entry.version) for entry in model.proto.opset_import)
    functions = sorted(function.SerializeToString(deterministic=True).hex() for function in model.proto.functions)
    return _hash(opsets, functions)


@dataclass(slots=True)
class _Reader:
    """Walks through the graphs of one model."""

    model: DetachedModel
    live: bool
    settle: Settle

    def graph(self, graph: GraphProto, meaning: dict[str, str]) -> str:
        """Digest of `graph`; adds the meanings of its values to those from outside."""
        meaning[""] = "absent"
        for index, info in enumerate(graph.input):
            # Names of graph inputs and outputs are the model's signature, so they count.
            meaning[info.name] = _hash("input", index, info.name, info.type.SerializeToString(deterministic=True).hex())
        initializers = []
        for tensor in graph.initializer:
            meaning[tensor.name] = self.tensor(tensor)
            initializers.append(meaning[tensor.name])
        for sparse in graph.sparse_initializer:
            meaning[sparse.values.name] = _hash("sparse", sparse.SerializeToString(deterministic=True).hex())
            initializers.append(meaning[sparse.values.name])
        nodes = [self.node(node, place, meaning) for place, node in enumerate(graph.node)]
        outputs = [(info.name, meaning.get(info.name, "missing")) for info in graph.output]
        inputs = [meaning[info.name] for info in graph.input]
        if self.live:
            return _hash(outputs, inputs)
        return _hash(sorted(initializers), sorted(nodes), outputs, inputs, len(graph.input))

    def node(self, node: NodeProto, place: int, meaning: dict[str, str]) -> str:
        """Digest of `node`; adds the meanings of its outputs."""
        if self.live and node.domain == "" and _is_transparent(node):
            meaning[node.output[0]] = self.seen_through(node, meaning)
            return ""
        attributes = sorted((one.name, self.attribute(one, meaning)) for one in node.attribute)
        inputs = [meaning.get(name, name) for name in node.input]
        digest = _hash(node.domain, node.op_type, attributes, inputs, [bool(name) for name in node.output])
        if node.op_type in RANDOM_OPS:
            digest = _hash(digest, place)  # two of them are two draws, although they look the same
        for index, name in enumerate(node.output):
            if name:
                meaning[name] = self.settle(name, _hash(digest, index))
        return digest

    def seen_through(self, node: NodeProto, meaning: dict[str, str]) -> str:
        if node.op_type == "Identity":
            return meaning.get(node.input[0], node.input[0])
        return self.tensor(node.attribute[0].t)

    def attribute(self, attribute: AttributeProto, meaning: dict[str, str]) -> str:
        graphs: Iterable[GraphProto] = (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs)
        inner = [self.graph(graph, dict(meaning)) for graph in graphs]
        if inner:
            return _hash(inner)
        if attribute.HasField("t"):
            return self.tensor(attribute.t)
        if attribute.doc_string:
            bare = AttributeProto()
            bare.CopyFrom(attribute)
            bare.ClearField("doc_string")
            attribute = bare
        return attribute.SerializeToString(deterministic=True).hex()

    def tensor(self, tensor: TensorProto) -> str:
        return _hash(list(tensor.dims), tensor.data_type, self.model.digest(tensor))


def _is_transparent(node: NodeProto) -> bool:
    return node.op_type == "Identity" or (node.op_type == "Constant" and node.attribute[0].name == "value")


def _hash(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
