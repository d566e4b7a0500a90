"""A model as one flat list of nodes and values, in which subgraphs and functions are not nested; and the state of a
matching of two of them: which node after a pass is which node from before it, as far as `match.py` knows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType
from typing import Final, NamedTuple

from onnx import FunctionProto, GraphProto, NodeProto, TensorProto

from passes.graph.index import initializers_of
from passes.graph.op_facts import COMMUTATIVE, domain_of, first_output
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


class NodeMatching:
    """For each node and value after the pass its counterpart before it, or -1; `match.py` fills it in."""

    def __init__(self, before: FlatGraph, after: FlatGraph) -> None:
        self.before, self.after = before, after
        self.old_of = [-1] * len(after.items)
        self.new_of = [-1] * len(before.items)
        self.value_of = [-1] * len(after.names)
        self.twins: dict[int, set[int]] = {}
        """Meaning → the unmatched old nodes that have it, where several nodes of a model have it."""
        first: dict[int, int] = {}
        # Equal values are one value, under all their names; the first represents them.
        self._representatives = [
            first.setdefault(meaning, value) for value, meaning in enumerate(before.value_meanings)
        ]

    def is_lost(self, old: int) -> bool:
        return self.new_of[old] < 0

    def claim(self, new: int, old: int) -> None:
        self.old_of[new], self.new_of[old] = old, new
        self.twins.get(self.before.items[old].meaning, set()).discard(old)
        for value, old_value in zip(self.after.items[new].makes, self.before.items[old].makes, strict=False):
            if value != ABSENT and old_value != ABSENT:
                self.value_of[value] = old_value

    def may_match(self, new: int, old: int) -> bool:
        """Whether both are unmatched, and `old` is among the twins of `new` if it has any."""
        if self.old_of[new] >= 0 or not self.is_lost(old):
            return False
        twins = self.open_twins(new)
        return not twins or old in twins

    def open_twins(self, new: int) -> set[int]:
        return self.twins.get(self.after.items[new].meaning, set())

    def open_new(self) -> list[int]:
        return [new for new, old in enumerate(self.old_of) if old < 0]

    def open_old(self) -> list[int]:
        return [old for old, new in enumerate(self.new_of) if new < 0]

    def counterpart(self, value: int) -> int:
        """The representative of the old value that a value after the pass is; -1 if it is not known."""
        old = self.value_of[value] if value != ABSENT else ABSENT
        return old if old < 0 else self._representatives[old]

    def representative(self, old_value: int) -> int:
        return old_value if old_value == ABSENT else self._representatives[old_value]

    def values_equal_to(self, old_value: int) -> list[int]:
        """All old values that equal this one: a pass may have merged them."""
        return self._equals[self._representatives[old_value]]

    @cached_property
    def _equals(self) -> dict[int, list[int]]:
        equals: dict[int, list[int]] = defaultdict(list)
        for value, first in enumerate(self._representatives):
            equals[first].append(value)
        return dict(equals)

    # The tables below are built on first use, after the matching by digests, and cover the nodes still unmatched then.

    @cached_property
    def olds_by_reading(self) -> dict[Hashable, list[int]]:
        olds: dict[Hashable, list[int]] = defaultdict(list)
        for old in self.open_old():
            item = self.before.items[old]
            olds[reading_of(item, [self.representative(value) for value in item.needs])].append(old)
        return dict(olds)

    @cached_property
    def olds_by_name(self) -> dict[Hashable, int]:
        return index_unique(self.open_old(), lambda old: handle_of(self.before, old, name_of))

    @cached_property
    def olds_by_result(self) -> dict[Hashable, int]:
        return index_unique(self.open_old(), lambda old: handle_of(self.before, old, result_of))

    @cached_property
    def old_values_by_name(self) -> dict[Hashable, int]:
        return index_unique(range(len(self.before.names)), lambda old: self.before.names[old])


Handle = Callable[[Item], str]


def name_of(item: Item) -> str:
    return item.node.name


def result_of(item: Item) -> str:
    """The name of the first output."""
    return first_output(item.node)


def handle_of(wiring: FlatGraph, place: int, handle: Handle) -> Hashable:
    """The node's op and name, or None if it has no name."""
    name = handle(wiring.items[place])
    return (wiring.items[place].op, name) if name else None


def reading_of(item: Item, needs: list[int]) -> Hashable:
    """A key of op, attributes and the values `needs`; the order of a commutative op's operands does not count."""
    return (item.op, item.settings, *(sorted(needs) if item.op[1] in COMMUTATIVE else needs))


def index_unique(places: Iterable[int], key_of: Callable[[int], Hashable]) -> dict[Hashable, int]:
    """Key → place, of the places whose key is unique."""
    places_by_key: dict[Hashable, list[int]] = defaultdict(list)
    for place in places:
        key = key_of(place)
        if key is not None:
            places_by_key[key].append(place)
    return {key: places[0] for key, places in places_by_key.items() if len(places) == 1}


def is_one_kind(same: NodeMatching, item: Item, old_item: Item) -> bool:
    """Whether both nodes have one op, and weights of one shape where both read weights."""
    if item.op != old_item.op:
        return False
    after, before = same.after, same.before
    pairs = zip(item.needs, old_item.needs, strict=False)
    stored = [(new, old) for new, old in pairs if new in after.shapes and old in before.shapes]
    weights = (pair for pair in stored if pair[0] in after.weights or pair[1] in before.weights)
    return all(after.shapes[new] == before.shapes[old] for new, old in weights)


def is_namesake(same: NodeMatching, new: int, old: int) -> bool:
    """Whether two nodes of one kind have one name, or outputs of one name."""
    item, old_item = same.after.items[new], same.before.items[old]
    return share_name(item, old_item) and is_one_kind(same, item, old_item)


def share_name(item: Item, old_item: Item) -> bool:
    """Whether two nodes, or their first outputs, have one name."""
    return any(handle(item) == handle(old_item) != "" for handle in (name_of, result_of))
