"""A model as one flat list of nodes and values, in which subgraphs and functions are not nested."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Final, NamedTuple

from onnx import FunctionProto, GraphProto, NodeProto, TensorProto

from passes.graph.index import initializers_of
from passes.graph.op_facts import domain_of
from passes.graph.traversal import bodies_of
from passes.model.canonical import CanonicalGraph, GraphReading, NodeReading
from passes.weights.detached import DetachedModel

ABSENT: Final = -1
"""The value id of an omitted optional input."""

TELLING: Final = 16
"""The fewest elements of a weight; smaller tensors are shapes, axes and scalars, which many nodes share."""

NodeMeanings = dict[Hashable, int]
"""Computation → its number. Two indices that share one can be compared: equal numbers mean equal results."""


class Item(NamedTuple):
    """One node. `needs` are the value ids of its inputs, then of its bodies' results; `makes` those of its outputs."""

    node: NodeProto
    op: tuple[str, str]
    settings: str
    """A digest of the op and the attributes, without the bodies of If, Loop and Scan."""
    needs: tuple[int, ...]
    makes: tuple[int, ...]
    meaning: int


class FlatGraph:
    """All nodes of a model, inner ones before the node that holds them, with the maker and the users of each value.

    Names are resolved to value ids once, in their scope: two branches may use one name for two values.
    """

    def __init__(self, meanings: NodeMeanings) -> None:
        self.items: list[Item] = []
        self.names: list[str] = []
        """Value id → its name."""
        self.value_meanings: list[int] = []
        self.makers: list[int] = []
        """Value id → index of the item that makes it; -1 for inputs and initializers."""
        self.users: list[list[tuple[int, int]]] = []
        """Value id → (index of an item that needs it, position among its needs)."""
        self.shapes: dict[int, tuple[int, ...]] = {}
        """Value id → shape, of stored tensors."""
        self.tensors: dict[int, TensorProto] = {}
        """Value id → initializer."""
        self.constants: set[int] = {ABSENT}
        """Stored tensors, and values computed from these alone."""
        self.weights: set[int] = set()
        """The constants that are large enough to identify a node."""
        self.outputs: dict[str, int] = {}
        self.carried: dict[int, bytes] = {}
        """Index of an item → the metadata and the doc string that were carried to its node, serialized.

        Most nodes survive many passes, and to copy them entry by entry takes longer than everything else."""
        self._meanings = meanings

    def intern(self, computation: Hashable) -> int:
        return self._meanings.setdefault(computation, len(self._meanings))

    def value(self, name: str, meaning: Hashable) -> int:
        self.names.append(name)
        self.value_meanings.append(self.intern(meaning))
        self.makers.append(-1)
        self.users.append([])
        return len(self.names) - 1

    def add(self, item: Item) -> None:
        index = len(self.items)
        self.items.append(item)
        if all(map(self.constants.__contains__, item.needs)):
            self.constants.update(item.makes)
            if not self.weights.isdisjoint(item.needs):
                self.weights.update(item.makes)
        for position, value in enumerate(item.needs):
            if value != ABSENT:
                self.users[value].append((index, position))
        for place, value in enumerate(item.makes):
            if value != ABSENT:
                self.makers[value] = index
                self.value_meanings[value] = self.intern((item.meaning, place))

    def store(self, value: int, shape: tuple[int, ...]) -> None:
        self.shapes[value] = shape
        self.constants.add(value)
        if math.prod(shape) >= TELLING:
            self.weights.add(value)


def flatten_graph(
    model: DetachedModel,
    reading: CanonicalGraph,
    meanings: NodeMeanings,
    called: Mapping[str, str] = MappingProxyType({}),
) -> FlatGraph:
    """Index `model`; `meanings` numbers what its nodes and values compute.

    Args:
        reading: the canonical graph of `model`, whose names and metadata may have changed since.
        called: input → its name in the other model of a comparison, where the names differ.
    """
    wiring = FlatGraph(meanings)
    walk = _GraphFlattener(wiring, called)
    values = walk.graph(model.proto.graph, reading.graph, {}, None)
    wiring.outputs = {info.name: value for info, value in zip(model.proto.graph.output, values, strict=True)}
    for function, body in zip(model.proto.functions, reading.functions, strict=True):
        walk.function(function, body)
    return wiring


@dataclass(frozen=True, slots=True)
class _GraphFlattener:
    wiring: FlatGraph
    called: Mapping[str, str]

    def graph(
        self, graph: GraphProto, reading: GraphReading, outer: dict[str, int], owner: Hashable
    ) -> tuple[int, ...]:
        """Add the nodes of `graph` and return the ids of its outputs. `owner` identifies the node whose body it is."""
        scope = dict(outer)
        for index, info in enumerate(graph.input):
            formal = ("input", self.called.get(info.name, info.name)) if owner is None else (owner, index)
            scope[info.name] = self.wiring.value(info.name, formal)
        tensors = initializers_of(graph)
        for name, digest in reading.stored:
            scope[name] = self.wiring.value(name, digest)
            if name in tensors:
                self.wiring.store(scope[name], tuple(tensors[name].dims))
                self.wiring.tensors[scope[name]] = tensors[name]
        self._nodes(graph.node, reading.nodes, scope)
        return tuple(self._read(info.name, scope) for info in graph.output)

    def function(self, function: FunctionProto, reading: GraphReading) -> None:
        key = (function.domain, function.name, getattr(function, "overload", ""))
        scope = {name: self.wiring.value(name, (key, index)) for index, name in enumerate(function.input)}
        self._nodes(function.node, reading.nodes, scope)

    def _nodes(self, nodes: Iterable[NodeProto], readings: Sequence[NodeReading], scope: dict[str, int]) -> None:
        for reading in readings:  # all outputs first, since a node may come before its producer
            scope.update({name: self.wiring.value(name, ("made", name)) for name in reading.outputs if name})
        for node, reading in zip(nodes, readings, strict=True):
            self._node(node, reading, scope)

    def _node(self, node: NodeProto, reading: NodeReading, scope: dict[str, int]) -> None:
        wiring = self.wiring
        meanings = wiring.value_meanings
        needs = [self._read(name, scope) if name else ABSENT for name in reading.inputs]
        makes = tuple([scope[name] if name else ABSENT for name in reading.outputs])
        known = tuple([ABSENT if value == ABSENT else meanings[value] for value in needs])
        meaning = wiring.intern((reading.says, reading.shape, known))
        if reading.bodies:
            bodies = [
                body for attribute in sorted(node.attribute, key=attrgetter("name")) for body in bodies_of(attribute)
            ]
            for index, (body, inner) in enumerate(zip(bodies, reading.bodies, strict=True)):
                results = self.graph(body, inner, scope, (meaning, index))
                needs.extend(results)
            meaning = wiring.intern((meaning, tuple([meanings[value] for value in needs[len(known) :]])))
        op = (domain_of(node), node.op_type)
        wiring.add(Item(node, op, reading.says, tuple(needs), makes, meaning))
        if reading.is_identity:
            meanings[makes[0]] = known[0]
        elif reading.constant:
            meanings[makes[0]] = wiring.intern(reading.constant)
            wiring.store(makes[0], tuple(node.attribute[0].t.dims))

    def _read(self, name: str, scope: dict[str, int]) -> int:
        if name not in scope:  # other checks report an invalid model
            scope[name] = self.wiring.value(name, ("missing", name))
        return scope[name]
