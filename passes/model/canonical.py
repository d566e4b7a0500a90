"""Digests of what graphs compute: names, metadata and the order of independent nodes do not count.

A model is read once (`canonicalize`); the digests of its values, under known equalities, are then computed from that.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Final, NamedTuple

from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, TensorProto

from passes.graph.index import copy_of
from passes.graph.op_facts import RANDOM_OPS
from passes.graph.traversal import bodies_of
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class ValueDigests:
    """A digest of each value's computation: values with equal digests are equal bit for bit.

    Dead code does not count, an Identity has the digest of its input, and a Constant node that of an initializer.
    `whole` is the digest of all outputs: models in which it is the same run the same operators on the same values, so
    their outputs are equal bit for bit and need no comparison.
    """

    values: Mapping[str, str]
    whole: str


Substitute = Callable[[str, str], str]
"""Name of a node's output and its digest → the digest to use in its place."""


def _as_it_is(_: str, digest: str) -> str:
    return digest


@dataclass(frozen=True)
class CanonicalModel:
    """A model without the names that do not matter; later changes of the model do not show in it."""

    header: str
    graph: CanonicalGraph
    functions: tuple[CanonicalGraph, ...]
    """The bodies of the model's own functions."""

    @cached_property
    def digest(self) -> str:
        """A digest of what the model computes: ops, attributes, edges and values.

        Every value is identified by its computation, so names and order do not count. Dead nodes and unused
        initializers do count, since removing them is a change; so does how often each value is read, since reading one
        of two equal values in place of the other may leave the other value dead.
        """
        return _mix(self.header, _walk(self.graph, {}, False, _as_it_is))

    def value_digests(self, substitute: Substitute = _as_it_is) -> ValueDigests:
        """The digest of every value.

        Args:
            substitute: called with the name and the digest of a value; returns that digest, or the digest of a value
                that is known to be equal.

        Returns:
            The digests by name, and the digest of all outputs.
        """
        digests: dict[str, str] = {}
        whole = _walk(self.graph, digests, True, substitute)
        return ValueDigests(digests, _mix(self.header, whole))


TensorKey = Callable[[DetachedModel, TensorProto], str]


def canonicalize(model: DetachedModel, tensor_key: TensorKey = DetachedModel.digest) -> CanonicalModel:
    """Read `model`: its attributes and constants, which is most of the work.

    Args:
        model: the model, whose names and order do not count.
        tensor_key: identifies a tensor; by default, its content.
    """
    opsets = sorted((entry.domain, entry.version) for entry in model.proto.opset_import)
    own = frozenset((function.domain, function.name) for function in model.proto.functions)
    reader = _GraphReader(model, own, "", tensor_key)
    bodies = tuple(
        CanonicalGraph((), (), reader.nodes(function.node), tuple(function.output))
        for function in model.proto.functions
    )
    functions = sorted(_function_digest(*pair) for pair in zip(model.proto.functions, bodies, strict=True))
    graph = replace(reader, bodies=digest_of_parts(functions) if functions else "").graph(model.proto.graph)
    return CanonicalModel(digest_of_parts(opsets, functions), graph, bodies)


def function_digests(model: DetachedModel, canonical: CanonicalModel) -> dict[str, str]:
    """`domain::name` (and overload) of each of the model's own functions → a digest of its computation."""
    found = {}
    for function, body in zip(model.proto.functions, canonical.functions, strict=True):
        overload = getattr(function, "overload", "")
        name = f"{function.domain}::{function.name}" + (f":{overload}" if overload else "")
        found[name] = _function_digest(function, body)
    return found


def _function_digest(function: FunctionProto, body: CanonicalGraph) -> str:
    """Digest of a function; the names of its values and nodes do not count."""
    digests = {name: digest_of_parts("input", index) for index, name in enumerate(function.input)}
    _walk(body, digests, True, _as_it_is)
    defaults = sorted(attribute.SerializeToString(deterministic=True).hex() for attribute in function.attribute_proto)
    opsets = sorted((entry.domain, entry.version) for entry in function.opset_import)
    computed = [digests.get(name, "missing") for name in function.output]
    called = (function.domain, function.name, getattr(function, "overload", ""))
    return digest_of_parts(called, len(function.input), sorted(function.attribute), defaults, opsets, computed)


def canonical_digest(model: DetachedModel) -> str:
    """`CanonicalModel.digest` of a model.

    Args:
        model: the model.

    Returns:
        Hex digits that are equal for models that differ in names and order alone.
    """
    return canonicalize(model).digest


def value_digests(model: DetachedModel) -> ValueDigests:
    """`CanonicalModel.value_digests` of a model."""
    return canonicalize(model).value_digests()


class CanonicalNode(NamedTuple):
    """A node: `op_digest`: of op and plain attributes; `arity`: the number of inputs, and which outputs exist."""

    op_digest: str
    arity: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    bodies: tuple[CanonicalGraph, ...]
    """In the order of the attributes' names."""
    is_identity: bool
    constant: str
    """The digest of the value of a Constant; empty for other nodes."""
    draw: str
    """Distinguishes random nodes that look the same; empty for other nodes."""


@dataclass(frozen=True, slots=True)
class CanonicalGraph:
    """A graph without its node names; `nodes` are in the graph's order."""

    inputs: tuple[tuple[str, str], ...]
    """Name and digest: names of a graph's inputs and outputs are its signature, so they count."""
    stored: tuple[tuple[str, str], ...]
    nodes: tuple[CanonicalNode, ...]
    outputs: tuple[str, ...]
    is_body: bool = False
    """Whether it is the body of a node: then inputs and outputs go by order, and their names do not count."""


def _walk(graph: CanonicalGraph, digests: dict[str, str], live: bool, substitute: Substitute) -> str:
    """Digest of `graph`; adds the digests of its values to those of outer values in `digests`."""
    digests[""] = "absent"
    digests.update(graph.inputs)
    digests.update(graph.stored)
    steps = [_step(node, digests, live, substitute) for node in graph.nodes]
    outputs = [(graph.is_body or name, digests.get(name, "missing")) for name in graph.outputs]
    inputs = [digests[name] for name, _ in graph.inputs]
    if live:
        return digest_of_parts(outputs, inputs)
    reads = _reads(graph)
    stored = sorted((digest, reads[name]) for name, digest in graph.stored)
    nodes = sorted(
        (step, *[reads[name] for name in node.outputs]) for step, node in zip(steps, graph.nodes, strict=True)
    )
    return digest_of_parts(stored, nodes, outputs, inputs)


def _reads(graph: CanonicalGraph) -> Counter[str]:
    """How often each value is read, in the bodies of its nodes too; outputs are read once more."""
    reads = Counter(graph.outputs)
    for node in graph.nodes:
        reads.update(node.inputs)
        for body in node.bodies:
            reads.update(_reads(body))
    return reads


def _step(node: CanonicalNode, digests: dict[str, str], live: bool, substitute: Substitute) -> str:
    """Digest of `node`; adds the digests of its outputs to `digests`."""
    if live and node.is_identity:
        digests[node.outputs[0]] = digests.get(node.inputs[0], node.inputs[0])
        return ""
    if live and node.constant:
        digests[node.outputs[0]] = node.constant
        return ""
    inner = [_walk(body, dict(digests), live, substitute) for body in node.bodies]
    digest = _mix(
        node.op_digest,
        node.arity,
        node.draw if live else "",
        *inner,
        *[digests.get(name) or digest_of_parts("missing", name) for name in node.inputs],
    )
    for index, name in enumerate(node.outputs):
        if name:
            digests[name] = substitute(name, f"{digest}.{index}")
    return digest


@dataclass(frozen=True, slots=True)
class _GraphReader:
    """Reads graphs of `model`; `own` are the names of its own functions, `bodies` a digest of all of them.

    `depth` is the number of bodies around the graph: in a body, an input of the body around it is another value.
    """

    model: DetachedModel
    own: frozenset[tuple[str, str]]
    bodies: str
    tensor_key: TensorKey
    depth: int = 0
    known: dict[Hashable, str] = field(default_factory=dict)
    """Digests by their parts."""

    def graph(self, graph: GraphProto) -> CanonicalGraph:
        inputs = []
        for index, info in enumerate(graph.input):
            kind = info.type.SerializeToString(deterministic=True)
            inputs.append((info.name, digest_of_parts("input", index, self.depth or info.name, kind)))
        stored = [(tensor.name, self.tensor(tensor)) for tensor in graph.initializer]
        for sparse in graph.sparse_initializer:
            bare = copy_of(sparse)
            bare.values.ClearField("name")
            stored.append((sparse.values.name, digest_of_parts("sparse", bare.SerializeToString(deterministic=True))))
        outputs = tuple(info.name for info in graph.output)
        return CanonicalGraph(tuple(inputs), tuple(stored), self.nodes(graph.node), outputs, self.depth > 0)

    def nodes(self, nodes: Iterable[NodeProto]) -> tuple[CanonicalNode, ...]:
        return tuple([self.node(node, index) for index, node in enumerate(nodes)])

    def node(self, node: NodeProto, index: int) -> CanonicalNode:
        plain, bodies, constant = [], [], ""
        for attribute in sorted(node.attribute, key=attrgetter("name")):
            inner = bodies_of(attribute)
            bodies.extend(replace(self, depth=self.depth + 1).graph(graph) for graph in inner)
            plain.append((attribute.name, len(inner) or self.attribute(attribute)))
        op, inputs, outputs = node.op_type, tuple(node.input), tuple(node.output)
        while inputs and not inputs[-1]:  # an optional input that is left out, written or not
            inputs = inputs[:-1]
        if op == "Constant" and node.domain == "" and node.attribute and node.attribute[0].name == "value":
            constant = self.tensor(node.attribute[0].t)
        is_random = op in RANDOM_OPS or any(inner.draw for body in bodies for inner in body.nodes)
        draw = f"#{index}" if is_random else ""  # equal random nodes draw different values
        arity = f"{len(inputs)}:{''.join(['1' if name else '0' for name in outputs])}"
        domain = "" if node.domain == "ai.onnx" else node.domain
        is_identity = op == "Identity" and domain == "" and len(inputs) == len(outputs) == 1
        overload = getattr(node, "overload", "")
        domain += f":{overload}" if overload else ""  # which of several functions is called
        op_digest = self.digest_op(domain, op, tuple(plain), self.bodies if (node.domain, op) in self.own else "")
        return CanonicalNode(op_digest, arity, inputs, outputs, tuple(bodies), is_identity, constant, draw)

    def digest_op(self, domain: str, op: str, plain: tuple[tuple[str, object], ...], bodies: str) -> str:
        """The digest of op and attributes, cached: many nodes of a model have the same."""
        key = (domain, op, plain, bodies)
        digest = self.known.get(key)
        if digest is None:
            digest = self.known[key] = digest_of_parts(domain, op, list(plain), bodies)
        return digest

    def attribute(self, attribute: AttributeProto) -> object:
        if attribute.HasField("t"):
            return self.tensor(attribute.t)
        if attribute.doc_string:
            bare = copy_of(attribute)
            bare.ClearField("doc_string")
            attribute = bare
        return attribute.SerializeToString(deterministic=True)

    def tensor(self, tensor: TensorProto) -> str:
        return digest_of_parts(list(tensor.dims), tensor.data_type, self.tensor_key(self.model, tensor))


def digest_of_parts(*parts: object) -> str:
    """A digest of the `repr` of `parts`."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _mix(*digests: str) -> str:
    """`digest_of_parts` for parts that are digests, which is quicker."""
    return hashlib.blake2b(",".join(digests).encode(), digest_size=16).hexdigest()


SMALL: Final = 16
"""Elements below which a tensor is a shape, an axis or a scale, and counts by its values."""

DIGITS: Final = 5
"""Digits of floating-point values: libraries on other processors may round further ones differently."""

LENGTH: Final = 12


def structure_fingerprint(model: DetachedModel) -> str:
    """Hex digits that change when an op, an attribute, an edge, or the shape or dtype of a weight does.

    Args:
        model: the model. As for `CanonicalModel.digest`, names and the order of independent nodes do not count. Weights
            count by shape and dtype; tensors of fewer than 16 elements by value.

    Returns:
        12 hex digits.
    """
    return canonicalize(model, _small_values_key).digest[:LENGTH]


def _small_values_key(model: DetachedModel, tensor: TensorProto) -> str:
    if math.prod(tensor.dims) >= SMALL or tensor.data_type == TensorProto.STRING:
        return ""
    values = model.array(tensor).ravel().tolist()
    return " ".join(f"{value:.{DIGITS}g}" if isinstance(value, float) else str(value) for value in values)
