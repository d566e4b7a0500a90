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
from passes.model.canonical import CanonicalGraph, CanonicalModel, CanonicalNode
from passes.weights.detached import DetachedModel

ABSENT: Final = -1
"""The value id of an omitted optional input."""

TELLING: Final = 16
"""The fewest elements of a weight; smaller tensors are shapes, axes and scalars, which many nodes share."""

DigestTable = dict[Hashable, int]
"""Computation → its digest, a small integer. Two graphs that share the table can be compared: equal digests mean
equal results."""


class Item(NamedTuple):
    """One node. `inputs`: the ids of the values that it reads, then of its bodies' results. `outputs`: ids too."""

    node: NodeProto
    op: tuple[str, str]
    op_digest: str
    """A digest of the op and the attributes, without the bodies of If, Loop and Scan."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    digest: int
    """Equal for nodes that compute the same."""


class FlatGraph:
    """All nodes of a model, inner ones before the node that holds them, with the producer and the uses of each value.

    Names are resolved to value ids once, in their scope: two branches may use one name for two values.
    """

    def __init__(self, table: DigestTable) -> None:
        self.items: list[Item] = []
        self.names: list[str] = []
        """Value id → its name."""
        self.value_digests: list[int] = []
        self.producers: list[int] = []
        """Value id → index of the item that produces it; -1 for inputs and initializers."""
        self.uses: list[list[tuple[int, int]]] = []
        """Value id → (index of an item that consumes it, position among its inputs)."""
        self.shapes: dict[int, tuple[int, ...]] = {}
        """Value id → shape, of stored tensors."""
        self.tensors: dict[int, TensorProto] = {}
        """Value id → initializer."""
        self.constants: set[int] = {ABSENT}
        """Stored tensors, and values computed from these alone."""
        self.weights: set[int] = set()
        """The constants that are large enough to identify a node."""
        self.formals: dict[int, str] = {}
        """Input of a body or of a function → the name of that body or function."""
        self.outputs: dict[str, int] = {}
        self.carried: dict[int, bytes] = {}
        """Index of an item → the metadata and the doc string that were carried to its node, serialized.

        Most nodes survive many passes, and to copy them entry by entry takes longer than everything else."""
        self._table = table

    def intern(self, computation: Hashable) -> int:
        return self._table.setdefault(computation, len(self._table))

    def value(self, name: str, computation: Hashable) -> int:
        """Add a value, and return its id."""
        self.names.append(name)
        self.value_digests.append(self.intern(computation))
        self.producers.append(-1)
        self.uses.append([])
        return len(self.names) - 1

    def add(self, item: Item) -> None:
        index = len(self.items)
        self.items.append(item)
        if all(map(self.constants.__contains__, item.inputs)):
            self.constants.update(item.outputs)
            if not self.weights.isdisjoint(item.inputs):
                self.weights.update(item.outputs)
        for position, value in enumerate(item.inputs):
            if value != ABSENT:
                self.uses[value].append((index, position))
        for output, value in enumerate(item.outputs):
            if value != ABSENT:
                self.producers[value] = index
                self.value_digests[value] = self.intern((item.digest, output))

    def store(self, value: int, shape: tuple[int, ...]) -> None:
        self.shapes[value] = shape
        self.constants.add(value)
        if math.prod(shape) >= TELLING:
            self.weights.add(value)


def flatten_graph(
    model: DetachedModel,
    canonical: CanonicalModel,
    table: DigestTable,
    called: Mapping[str, str] = MappingProxyType({}),
) -> FlatGraph:
    """Index `model`; `table` holds the digests of what its nodes and values compute.

    Args:
        model: the model to index.
        canonical: the canonical form of `model`, whose names and metadata may have changed since.
        table: holds the digests of what nodes and values compute; shared by the models that are compared.
        called: input → its name in the other model of a comparison, where the names differ.
    """
    flat = FlatGraph(table)
    walk = _GraphFlattener(flat, called)
    values = walk.graph(model.proto.graph, canonical.graph, {}, None)
    flat.outputs = {info.name: value for info, value in zip(model.proto.graph.output, values, strict=True)}
    for function, body in zip(model.proto.functions, canonical.functions, strict=True):
        walk.function(function, body)
    return flat


@dataclass(frozen=True, slots=True)
class _GraphFlattener:
    flat: FlatGraph
    called: Mapping[str, str]

    def graph(
        self, graph: GraphProto, canonical: CanonicalGraph, outer: dict[str, int], owner: Hashable
    ) -> tuple[int, ...]:
        """Add the nodes of `graph` and return the ids of its outputs. `owner` identifies the node whose body it is."""
        scope = dict(outer)
        for index, info in enumerate(graph.input):
            formal = ("input", self.called.get(info.name, info.name)) if owner is None else (owner, index)
            scope[info.name] = self.flat.value(info.name, formal)
            if owner is not None:
                self.flat.formals[scope[info.name]] = graph.name
        tensors = initializers_of(graph)
        for name, digest in canonical.stored:
            scope[name] = self.flat.value(name, digest)
            if name in tensors:
                self.flat.store(scope[name], tuple(tensors[name].dims))
                self.flat.tensors[scope[name]] = tensors[name]
        self._nodes(graph.node, canonical.nodes, scope)
        return tuple(self._read(info.name, scope) for info in graph.output)

    def function(self, function: FunctionProto, canonical: CanonicalGraph) -> None:
        key = (function.domain, function.name, getattr(function, "overload", ""))
        scope = {name: self.flat.value(name, (key, index)) for index, name in enumerate(function.input)}
        self.flat.formals.update(dict.fromkeys(scope.values(), f"{function.domain}::{function.name}"))
        self._nodes(function.node, canonical.nodes, scope)

    def _nodes(self, nodes: Iterable[NodeProto], canonicals: Sequence[CanonicalNode], scope: dict[str, int]) -> None:
        for canonical in canonicals:  # all outputs first, since a node may come before its producer
            scope.update({name: self.flat.value(name, ("made", name)) for name in canonical.outputs if name})
        for node, canonical in zip(nodes, canonicals, strict=True):
            self._node(node, canonical, scope)

    def _node(self, node: NodeProto, canonical: CanonicalNode, scope: dict[str, int]) -> None:
        flat = self.flat
        digests = flat.value_digests
        inputs = [self._read(name, scope) if name else ABSENT for name in canonical.inputs]
        outputs = tuple([scope[name] if name else ABSENT for name in canonical.outputs])
        known = tuple([ABSENT if value == ABSENT else digests[value] for value in inputs])
        digest = flat.intern((canonical.op_digest, canonical.arity, known))
        if canonical.bodies:
            bodies = [
                body for attribute in sorted(node.attribute, key=attrgetter("name")) for body in bodies_of(attribute)
            ]
            for index, (body, inner) in enumerate(zip(bodies, canonical.bodies, strict=True)):
                results = self.graph(body, inner, scope, (digest, index))
                inputs.extend(results)
            digest = flat.intern((digest, tuple([digests[value] for value in inputs[len(known) :]])))
        op = (domain_of(node), node.op_type)
        flat.add(Item(node, op, canonical.op_digest, tuple(inputs), outputs, digest))
        if canonical.is_identity:
            digests[outputs[0]] = known[0]
        elif canonical.constant:
            digests[outputs[0]] = flat.intern(canonical.constant)
            flat.store(outputs[0], tuple(node.attribute[0].t.dims))

    def _read(self, name: str, scope: dict[str, int]) -> int:
        if name not in scope:  # other checks report an invalid model
            scope[name] = self.flat.value(name, ("missing", name))
        return scope[name]


class NodeMatching:
    """For each node and value after the pass its counterpart before it, or -1; `match.py` fills it in."""

    def __init__(self, before: FlatGraph, after: FlatGraph) -> None:
        self.before, self.after = before, after
        self.old_of = [-1] * len(after.items)
        self.new_of = [-1] * len(before.items)
        self.value_of = [-1] * len(after.names)
        self.duplicates: dict[int, set[int]] = {}
        """Digest → the unmatched old nodes that have it, where several nodes of a model have it."""
        first: dict[int, int] = {}
        # Equal values are one value, under all their names; the first represents them.
        self._representatives = [first.setdefault(digest, value) for value, digest in enumerate(before.value_digests)]

    def is_lost(self, old: int) -> bool:
        return self.new_of[old] < 0

    def claim(self, new: int, old: int) -> None:
        self.old_of[new], self.new_of[old] = old, new
        self.duplicates.get(self.before.items[old].digest, set()).discard(old)
        for value, old_value in zip(self.after.items[new].outputs, self.before.items[old].outputs, strict=False):
            if value != ABSENT and old_value != ABSENT:
                self.value_of[value] = old_value

    def may_match(self, new: int, old: int) -> bool:
        """Whether both are unmatched, and `old` computes the same as `new` if several unmatched old nodes do."""
        if self.old_of[new] >= 0 or not self.is_lost(old):
            return False
        duplicates = self.open_duplicates(new)
        return not duplicates or old in duplicates

    def open_duplicates(self, new: int) -> set[int]:
        return self.duplicates.get(self.after.items[new].digest, set())

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
    def olds_by_inputs(self) -> dict[Hashable, list[int]]:
        olds: dict[Hashable, list[int]] = defaultdict(list)
        for old in self.open_old():
            item = self.before.items[old]
            olds[input_key_of(item, [self.representative(value) for value in item.inputs])].append(old)
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
    """The name of an item's node; empty for none."""
    return item.node.name


def result_of(item: Item) -> str:
    """The name of the first output."""
    return first_output(item.node)


def handle_of(flat: FlatGraph, index: int, handle: Handle) -> Hashable:
    """The node's op and name, or None if it has no name."""
    name = handle(flat.items[index])
    return (flat.items[index].op, name) if name else None


def input_key_of(item: Item, inputs: list[int]) -> Hashable:
    """A key of op, attributes and the values `inputs`; the order of a commutative op's operands does not count."""
    return (item.op, item.op_digest, *(sorted(inputs) if item.op[1] in COMMUTATIVE else inputs))


def index_unique(indices: Iterable[int], key_of: Callable[[int], Hashable]) -> dict[Hashable, int]:
    """Key → index, of the node or value indices whose key is unique."""
    indices_by_key: dict[Hashable, list[int]] = defaultdict(list)
    for index in indices:
        key = key_of(index)
        if key is not None:
            indices_by_key[key].append(index)
    return {key: indices[0] for key, indices in indices_by_key.items() if len(indices) == 1}


def is_one_kind(matching: NodeMatching, item: Item, old_item: Item) -> bool:
    """Whether both nodes have one op, and weights of one shape where both read weights."""
    if item.op != old_item.op:
        return False
    after, before = matching.after, matching.before
    pairs = zip(item.inputs, old_item.inputs, strict=False)
    stored = [(new, old) for new, old in pairs if new in after.shapes and old in before.shapes]
    weights = (pair for pair in stored if pair[0] in after.weights or pair[1] in before.weights)
    return all(after.shapes[new] == before.shapes[old] for new, old in weights)


def is_namesake(matching: NodeMatching, new: int, old: int) -> bool:
    """Whether two nodes of one kind have one name, or outputs of one name."""
    item, old_item = matching.after.items[new], matching.before.items[old]
    return share_name(item, old_item) and is_one_kind(matching, item, old_item)


def share_name(item: Item, old_item: Item) -> bool:
    """Whether two nodes, or their first outputs, have one name."""
    return any(handle(item) == handle(old_item) != "" for handle in (name_of, result_of))
