"""A model as one flat list of nodes and values: subgraphs and functions lie in it beside what holds them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, TensorProto, numpy_helper

from passes.weights import DETACH_FROM_BYTES, DetachedModel, digest_of

__all__ = ["ABSENT", "Item", "Meanings", "Wiring", "bodies_of", "wire"]

ABSENT: Final = -1
"""The value id of an optional input that is not given."""

TELLING: Final = 16
"""Elements from which on a tensor is a weight; smaller ones are shapes, axes and scalars, which many nodes share."""

Meanings = dict[Hashable, int]
"""Numbers for what things compute. Two wirings that share one can be compared: equal numbers mean equal results."""


class Item(NamedTuple):
    """One node. `needs` are the ids of its inputs, then of what its bodies return; `makes` those of its outputs."""

    node: NodeProto
    op: tuple[str, str]
    settings: Hashable
    """Its attributes but for the bodies of If, Loop and Scan."""
    needs: tuple[int, ...]
    makes: tuple[int, ...]
    meaning: int


class Wiring:
    """All nodes of a model, inner ones before the node that holds them, with who makes and who reads each value.

    Names are looked up once, where they are visible: two branches may use one name for two values.
    """

    def __init__(self, meanings: Meanings) -> None:
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
        self.constants: set[int] = {ABSENT}
        """Stored tensors, and what is computed from nothing else."""
        self.weights: set[int] = set()
        """Those of them that are large enough to tell one node from another."""
        self.outputs: dict[str, int] = {}
        self._meanings = meanings

    def intern(self, what: Hashable) -> int:
        return self._meanings.setdefault(what, len(self._meanings))

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


_Tensor = tuple[tuple[int, ...], int, Hashable]
"""Shape, ONNX dtype, and the bytes or their digest."""


class _Stored(NamedTuple):
    """The settings of a node that holds a tensor."""

    tensor: _Tensor


def wire(model: DetachedModel, meanings: Meanings) -> Wiring:
    """Index `model`; what its nodes and values mean is numbered in `meanings`, and goes by what they compute from."""
    wiring = Wiring(meanings)
    walk = _Walk(wiring, model)
    values = walk.graph(model.proto.graph, {}, None)
    wiring.outputs = {info.name: value for info, value in zip(model.proto.graph.output, values, strict=True)}
    for function in model.proto.functions:
        walk.function(function)
    return wiring


def bodies_of(attribute: AttributeProto) -> tuple[GraphProto, ...]:
    return (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs)


@dataclass(frozen=True, slots=True)
class _Walk:
    wiring: Wiring
    model: DetachedModel

    def graph(self, graph: GraphProto, outer: dict[str, int], owner: Hashable) -> tuple[int, ...]:
        """Add the nodes of `graph`; returns the ids of its outputs. `owner` says whose body it is."""
        scope = dict(outer)
        for index, info in enumerate(graph.input):
            formal = ("input", info.name) if owner is None else (owner, index)
            scope[info.name] = self.wiring.value(info.name, formal)
        for tensor in graph.initializer:
            stored = self._tensor(tensor)
            scope[tensor.name] = self.wiring.value(tensor.name, stored)
            self.wiring.store(scope[tensor.name], stored[0])
        for sparse in graph.sparse_initializer:
            name = sparse.values.name
            scope[name] = self.wiring.value(name, ("sparse", sparse.SerializeToString(deterministic=True)))
        self._nodes(graph.node, scope)
        return tuple(self._read(info.name, scope) for info in graph.output)

    def function(self, function: FunctionProto) -> None:
        key = (function.domain, function.name, getattr(function, "overload", ""))
        names = enumerate(function.input)
        self._nodes(function.node, {name: self.wiring.value(name, (key, index)) for index, name in names})

    def _nodes(self, nodes: Iterable[NodeProto], scope: dict[str, int]) -> None:
        listed = list(nodes)
        for node in listed:  # first, since a node may come before one that it reads
            scope.update({name: self.wiring.value(name, ("made", name)) for name in node.output if name})
        for node in listed:
            self._node(node, scope)

    def _node(self, node: NodeProto, scope: dict[str, int]) -> None:
        wiring = self.wiring
        meanings = wiring.value_meanings
        needs = [self._read(name, scope) if name else ABSENT for name in node.input]
        makes = tuple([scope[name] if name else ABSENT for name in node.output])
        known = tuple([ABSENT if one == ABSENT else meanings[one] for one in needs])
        op = ("" if node.domain == "ai.onnx" else node.domain, node.op_type)
        settings, bodies = self._attributes(node)
        meaning = wiring.intern((op, settings, known, len(makes)))
        if bodies:
            results = [one for key, body in bodies for one in self.graph(body, scope, (meaning, key))]
            meaning = wiring.intern((meaning, tuple([meanings[one] for one in results])))
            needs.extend(results)
        wiring.add(Item(node, op, settings, tuple(needs), makes, meaning))
        if op == ("", "Identity"):
            meanings[makes[0]] = known[0]
        elif op == ("", "Constant") and isinstance(settings, _Stored):
            meanings[makes[0]] = wiring.intern(settings.tensor)
            wiring.store(makes[0], settings.tensor[0])

    def _read(self, name: str, scope: dict[str, int]) -> int:
        if name not in scope:  # an invalid model is for others to judge
            scope[name] = self.wiring.value(name, ("missing", name))
        return scope[name]

    def _attributes(self, node: NodeProto) -> tuple[Hashable, list[tuple[Hashable, GraphProto]]]:
        """What an operator is told beside its inputs, and the graphs that it runs."""
        plain, bodies = [], []
        for attribute in node.attribute:
            inner = bodies_of(attribute)
            if inner:
                bodies.extend(((attribute.name, index), body) for index, body in enumerate(inner))
            elif attribute.name == "value" and attribute.HasField("t"):
                return _Stored(self._tensor(attribute.t)), []  # a constant, whichever field holds its numbers
            else:
                plain.append(attribute.SerializeToString(deterministic=True))
        return tuple(sorted(plain)), bodies

    def _tensor(self, tensor: TensorProto) -> _Tensor:
        dims, kind = tuple(tensor.dims), tensor.data_type
        if kind == TensorProto.STRING:
            return (dims, kind, tuple(tensor.string_data))
        weight = self.model.weight(tensor)
        if weight is not None:
            return (dims, kind, weight.digest)
        data = tensor.raw_data or numpy_helper.to_array(tensor).tobytes()
        long = len(data) >= DETACH_FROM_BYTES
        return (dims, kind, digest_of(np.frombuffer(data, np.uint8)) if long else data)
