"""One index of a graph: producers, consumers, constants and types, in the words of onnx_ir over ONNX's own messages.

An index of onnx_ir's objects takes 110 ms at 937 nodes; these maps take 1 ms each, and each is made when it is first
asked for.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from google.protobuf.message import Message
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from passes.graph.op_facts import ARRANGING, ONNX_DOMAINS, is_opaque
from passes.graph.traversal import bodies_in, every_graph, live_nodes, own_names, positions_of, reads_of, walk

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

Entry = TypeVar("Entry", bound=Message)


class GraphIndex:
    """The producer and the consumers of each value of a graph, and the tensors that the graph stores.

    An index describes the graph at the time of each first question: after an edit, make a new index.

    The bodies of If, Loop and Scan are graphs of their own, so their nodes are not among `nodes`. What a body reads
    from outside counts in `reads` alone. The index of a body knows the values around it as well if it gets `outer`.

    Args:
        graph: a graph, the body of a node, or a function.
        nodes: the nodes to index; by default, those of `graph`.
        outer: the index of the graph around a body; names are unique along the nesting.
    """

    def __init__(
        self,
        graph: GraphProto | FunctionProto,
        nodes: Iterable[NodeProto] | None = None,
        outer: GraphIndex | None = None,
    ) -> None:
        self.graph = graph
        self.outer = outer
        self.own: list[NodeProto] = list(graph.node if nodes is None else nodes)
        """The nodes of this graph, without the nodes of the graphs around it."""

    @cached_property
    def nodes(self) -> list[NodeProto]:
        """All nodes; the nodes of the graphs around this graph come first."""
        return [*self.outer.nodes, *self.own] if self.outer is not None else self.own

    @cached_property
    def producers(self) -> dict[str, NodeProto]:
        """Computed value → the node that makes it, in the order of the nodes."""
        return producers_of(self.nodes)

    @cached_property
    def positions(self) -> dict[str, int]:
        """Computed value → the position in `nodes` of the node that makes it."""
        return positions_of(self.nodes)

    @cached_property
    def consumers(self) -> defaultdict[str, list[NodeProto]]:
        """Value → the nodes that have it as an input, each once."""
        consumers: defaultdict[str, list[NodeProto]] = defaultdict(list)
        for node in self.nodes:
            for name in dict.fromkeys(node.input):
                consumers[name].append(node)
        return consumers

    @cached_property
    def uses(self) -> defaultdict[str, list[tuple[int, int]]]:
        """Value → (position of a node in `nodes`, index among its inputs) for each input that it is."""
        uses: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for position, node in enumerate(self.nodes):
            for index, name in enumerate(node.input):
                if name:
                    uses[name].append((position, index))
        return uses

    @cached_property
    def readers(self) -> defaultdict[str, set[int]]:
        """Value → the positions in `nodes` of the nodes that read it, in their bodies too."""
        readers: defaultdict[str, set[int]] = defaultdict(set)
        for position, node in enumerate(self.nodes):
            for name in reads_of(node):
                readers[name].add(position)
        return readers

    @cached_property
    def crossing(self) -> list[int]:
        """For each position in `nodes`, and the end, how many values are computed before it and are inputs of nodes
        at it or later; those of Constants do not count."""
        changes = Counter[int]()
        for name, producer in self.positions.items():
            if name in self.uses and self.nodes[producer].op_type != "Constant":
                changes[producer + 1] += 1
                changes[max(position for position, _ in self.uses[name]) + 1] -= 1
        return list(itertools.accumulate(changes[position] for position in range(len(self.nodes) + 1)))

    @cached_property
    def reads(self) -> Counter[str]:
        """Value → how often nodes, bodies of nodes, and the outputs of the graph read it."""
        return Counter(itertools.chain(self.outputs, *map(reads_of, self.nodes)))

    @cached_property
    def initializers(self) -> dict[str, TensorProto]:
        """Stored tensors by name, in their order."""
        outer = self.outer.initializers if self.outer is not None else {}
        return {**outer, **(initializers_of(self.graph) if isinstance(self.graph, GraphProto) else {})}

    @cached_property
    def constants(self) -> dict[str, TensorProto]:
        """Tensors whose values are fixed: initializers that no input overrides, and what Constant nodes hold."""
        fixed = {name: tensor for name, tensor in self.initializers.items() if name not in self.inputs}
        for node in self.nodes:
            tensor = constant_of(node)
            if tensor is not None:
                fixed[node.output[0]] = tensor
        return fixed

    @cached_property
    def folded(self) -> set[str]:
        """Stored values, and values computed only from them, which an optimizer may fold; and "", an input left out."""
        folded = {"", *self.initializers}
        for node in self.nodes:
            if folded.issuperset(node.input) and not is_opaque(node):
                folded.update(node.output)
        return folded

    @cached_property
    def live(self) -> list[NodeProto]:
        """The nodes of the graph that an output depends on, last first."""
        assert isinstance(self.graph, GraphProto), "a function is inlined first"
        return live_nodes(self.graph)

    @cached_property
    def live_values(self) -> frozenset[str]:
        """The values that the live nodes make."""
        return frozenset(computed_values(self.live))

    @cached_property
    def inputs(self) -> dict[str, ValueInfoProto]:
        """Declared inputs by name, also those with an initializer as their default; of a function, without types."""
        return _infos(self.graph.input)

    @cached_property
    def required_inputs(self) -> dict[str, ValueInfoProto]:
        """The inputs that must be fed: the inputs without an initializer."""
        return {name: info for name, info in self.inputs.items() if name not in self.initializers}

    @cached_property
    def outputs(self) -> dict[str, ValueInfoProto]:
        """The outputs by name; of a function, without types."""
        return _infos(self.graph.output)

    @cached_property
    def types(self) -> dict[str, ValueInfoProto]:
        """Value → the type that the graph declares for it; `passes.graph.inference` infers the rest."""
        return {info.name: info for info in (*self.inputs.values(), *self.graph.value_info, *self.outputs.values())}

    def producer(self, name: str) -> NodeProto | None:
        """The node that makes a value.

        Args:
            name: the value.

        Returns:
            The node; None for an input, a stored tensor, and a value that does not exist.
        """
        return self.producers.get(name)

    def origin_of(self, name: str, ops: Collection[str]) -> str:
        """Walk upstream from a value through nodes of some operators, to the first input of each node.

        Args:
            name: the value to begin with.
            ops: the operators to walk through.

        Returns:
            The value where the walk ends: `name` itself if no node of `ops` makes it.
        """
        while (node := self.producers.get(name)) is not None and node.op_type in ops and node.output[0] == name:
            name = node.input[0]
        return name

    def tensor_at(self, name: str) -> TensorProto | None:
        """The tensor that a value is, stored or in a Constant, perhaps in another layout or type.

        Args:
            name: the value.

        Returns:
            The tensor; None for other values.
        """
        name = self.origin_of(name, ARRANGING)
        node = self.producers.get(name)
        return self.initializers.get(name) if node is None else constant_of(node)

    def ancestors(self, names: Iterable[str], within: Container[str] | None = None) -> list[NodeProto]:
        """The nodes that the values `names` are computed from, in the order of the graph.

        Args:
            names: the values to begin with.
            within: the values to go through; by default, all.
        """

        def producers(names: Iterable[str]) -> list[int]:
            known = (name for name in names if name in self.positions)
            return [self.positions[name] for name in known if within is None or name in within]

        found = walk(producers(names), lambda position: producers(reads_of(self.nodes[position])))
        return [self.nodes[position] for position in sorted(found)]


def _infos(declared: Iterable[ValueInfoProto | str]) -> dict[str, ValueInfoProto]:
    infos = (ValueInfoProto(name=info) if isinstance(info, str) else info for info in declared)
    return {info.name: info for info in infos}


def initializers_of(graph: GraphProto) -> dict[str, TensorProto]:
    """The stored tensors of `graph` by name, in their order."""
    return {tensor.name: tensor for tensor in graph.initializer}


def required_inputs(graph: GraphProto) -> list[ValueInfoProto]:
    """The inputs of `graph` that must be fed: the inputs without an initializer."""
    return list(GraphIndex(graph).required_inputs.values())


def producers_of(nodes: Iterable[NodeProto]) -> dict[str, NodeProto]:
    """Computed value → the node of `nodes` that makes it, in the order of the nodes."""
    return {name: node for node in nodes for name in node.output if name}


def computed_values(nodes: Iterable[NodeProto]) -> dict[str, None]:
    """The values that `nodes` make, in order: a set that keeps its order."""
    return {name: None for node in nodes for name in node.output if name}


def values_read(nodes: Sequence[NodeProto]) -> list[str]:
    """The values that some nodes, or their bodies, read and do not make.

    Args:
        nodes: the nodes.

    Returns:
        Names, each once, in the order in which they are read.
    """
    computed = computed_values(nodes)
    return [name for name in dict.fromkeys(name for node in nodes for name in reads_of(node)) if name not in computed]


def value_names(graph: GraphProto) -> set[str]:
    """Every name of a value in `graph` and in its bodies."""
    names: set[str] = set()
    for inner in every_graph(graph):
        declared = (*inner.input, *inner.output, *inner.initializer, *inner.value_info)
        names.update(entry.name for entry in declared)
        names.update(sparse.values.name for sparse in inner.sparse_initializer)
        names.update(name for node in inner.node for name in (*node.input, *node.output))
    return names


def free_name(name: str, taken: Collection[str], second: int = 2) -> str:
    """A name that is not taken.

    Args:
        name: the name to begin with.
        taken: the names that are taken; they stay as they are.
        second: the first number to add.

    Returns:
        `name`, or where it is taken the first of `name_2`, `name_3`, … that is free.
    """
    candidate, number = name, second
    while candidate in taken:
        candidate = f"{name}_{number}"
        number += 1
    return candidate


def take_name(name: str, taken: set[str], second: int = 2) -> str:
    """`free_name`, which is taken then.

    Args:
        name: the name to begin with.
        taken: the names that are taken; the result is added.
        second: the first number to add.

    Returns:
        The free name.
    """
    name = free_name(name, taken, second)
    taken.add(name)
    return name


def constant_of(node: NodeProto) -> TensorProto | None:
    """The tensor that a Constant node holds; None for another node, and for a Constant of strings, of sparse data, or
    of an attribute of the function that it is in."""
    if node.op_type != "Constant" or node.domain not in ONNX_DOMAINS:
        return None
    (attribute,) = node.attribute
    if attribute.HasField("t"):
        return attribute.t
    if attribute.ref_attr_name:
        return None
    dtype = PLAIN_VALUES.get(attribute.name)
    value = None if dtype is None else helper.get_attribute_value(attribute)  # None in a broken file
    return None if value is None else numpy_helper.from_array(np.asarray(value, dtype))


def replace_all_uses_with(nodes: Iterable[NodeProto], replacements: Mapping[str, str]) -> None:
    """Let nodes, and their bodies, read other values, in place.

    A body that has a value of its own by an old name keeps reading that value. A body may also return a value from
    outside. The outputs of the graph of `nodes` are left to the caller.

    Args:
        nodes: the nodes to change.
        replacements: old name → new name.
    """
    for node in nodes:
        if any(name in replacements for name in node.input):
            node.input[:] = [replacements.get(name, name) for name in node.input]
        for body in bodies_in(node):
            own = own_names(body)
            inner = {old: new for old, new in replacements.items() if old not in own}
            replace_all_uses_with(body.node, inner)
            for info in body.output:
                info.name = inner.get(info.name, info.name)


def extract(
    source: ModelProto,
    nodes: Sequence[NodeProto],
    *,
    inputs: Iterable[ValueInfoProto | str] = (),
    outputs: Iterable[ValueInfoProto | str] = (),
    initializers: Iterable[TensorProto] | None = None,
) -> ModelProto:
    """Return `nodes` as a model of their own, with the versions and functions of `source`.

    Args:
        source: the model that the nodes are taken from.
        nodes: in an order in which they can run.
        inputs: typed inputs, or names, which are declared without a type.
        outputs: typed outputs, or names.
        initializers: by default, the stored tensors of `source` that the nodes read.
    """
    part = ModelProto(ir_version=source.ir_version, opset_import=source.opset_import, functions=source.functions)
    part.graph.name = "part"
    part.graph.input.extend(_infos(inputs).values())
    part.graph.output.extend(_infos(outputs).values())
    part.graph.node.extend(nodes)
    if initializers is None:
        stored = initializers_of(source.graph)
        initializers = (stored[name] for name in values_read(nodes) if name in stored)
    part.graph.initializer.extend(initializers)
    return part


def copy_of(message: Entry) -> Entry:
    """A copy of a protobuf message, to change."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def replace_entries(field: RepeatedCompositeFieldContainer[Entry], entries: Iterable[Entry]) -> None:
    """Make some messages all that a repeated field holds.

    Args:
        field: a field such as `graph.node`.
        entries: the messages; they may be some of the field's own.
    """
    copies = [copy_of(entry) for entry in entries]  # first, since clearing the field frees its entries
    del field[:]
    field.extend(copies)


def keep_outputs(graph: GraphProto, names: Iterable[str]) -> None:
    """Make these values the outputs of a graph, without their types, and remove the nodes that none of them needs."""
    replace_entries(graph.output, (ValueInfoProto(name=name) for name in names))
    replace_entries(graph.node, live_nodes(graph)[::-1])


def drop_unread(graph: GraphProto, spare: Collection[str] = ()) -> None:
    """Remove, in place, the stored tensors that nothing reads, and the types of values that no node makes any more.

    Args:
        graph: the graph; what is an input stays.
        spare: stored tensors that stay too, such as those that nothing has read before.
    """
    index = GraphIndex(graph)
    read, made = index.reads.keys() | index.inputs.keys(), index.producers.keys() | index.inputs.keys()
    tensors = [tensor for tensor in graph.initializer if tensor.name in read or tensor.name in spare]
    infos = [info for info in graph.value_info if info.name in made]
    if len(tensors) < len(graph.initializer):
        replace_entries(graph.initializer, tensors)
    if len(infos) < len(graph.value_info):
        replace_entries(graph.value_info, infos)


def unread_tensors(graph: GraphProto) -> set[str]:
    """The stored tensors that neither a node nor an output reads."""
    return initializers_of(graph).keys() - GraphIndex(graph).reads.keys()


PLAIN_VALUES: Final = {
    **dict.fromkeys(("value_float", "value_floats"), np.float32),
    **dict.fromkeys(("value_int", "value_ints"), np.int64),
}
"""Attribute of a Constant → the dtype of its elements."""


def delete_named(field: RepeatedCompositeFieldContainer[Any], names: Collection[str]) -> None:
    """Delete from a repeated field the messages that have one of `names`.

    Args:
        field: a field such as `graph.initializer`.
        names: names of its messages; others do not count.
    """
    for place in reversed([place for place, entry in enumerate(field) if entry.name in names]):
        del field[place]
