"""Walks through a graph: bodies of nodes, the values that a node reads, live nodes, topological order.

`pause_collector` stops Python's garbage collector during a walk: it would visit the model's objects again and again.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import prod
from types import MethodType
from typing import Final, Generic, TypeVar
from weakref import WeakMethod

import numpy as np
import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, TensorProto, inliner, numpy_helper

from passes.errors import ModelError
from passes.graph.layer_calls import inline_layers
from passes.graph.op_facts import ONNX_DOMAINS, SIZES, WITH_BODIES


def bodies_of(attribute: AttributeProto) -> tuple[GraphProto, ...]:
    """The graphs that one attribute holds; most attributes hold none."""
    graphs = attribute.graphs
    if attribute.HasField("g"):
        return (attribute.g, *graphs)
    return tuple(graphs) if graphs else ()


def bodies_in(node: NodeProto) -> list[GraphProto]:
    """The branches of an If, the body of a Loop or Scan. Other operators of ONNX have none, which their names tell in a
    seventh of the time that their attributes take."""
    if node.op_type not in WITH_BODIES and node.domain in ONNX_DOMAINS:
        return []
    return [body for attribute in node.attribute for body in bodies_of(attribute)]


def every_graph(graph: GraphProto) -> Iterator[GraphProto]:
    """`graph`, and the bodies of its nodes at any depth."""
    yield graph
    for node in graph.node:
        for body in bodies_in(node):
            yield from every_graph(body)


def every_node(graph: GraphProto | FunctionProto) -> Iterator[NodeProto]:
    """The nodes of `graph`, each followed by the nodes of its bodies."""
    for node in graph.node:
        yield node
        for body in bodies_in(node):
            yield from every_node(body)


def reads_of(node: NodeProto) -> list[str]:
    """Names that `node` reads; for If, Loop and Scan also the names that its bodies read from outside."""
    names = [name for name in node.input if name]
    for body in bodies_in(node):
        names.extend(_from_outside(body))
    return names


def read_names(nodes: Iterable[NodeProto]) -> set[str]:
    """The values that some nodes, or their bodies, read."""
    return {name for node in nodes for name in reads_of(node)}


def positions_of(nodes: Iterable[NodeProto]) -> dict[str, int]:
    """Computed value → the position in `nodes` of its producer, in the order of the nodes."""
    return {name: position for position, node in enumerate(nodes) for name in node.output if name}


def producers_read(nodes: Sequence[NodeProto]) -> list[set[int]]:
    """For each node, the positions of the nodes that make what it, or a body of it, reads."""
    positions = positions_of(nodes)
    return [{positions[name] for name in reads_of(node) if name in positions} for node in nodes]


def own_names(graph: GraphProto) -> set[str]:
    """The values of `graph` itself: its inputs, its stored tensors, and what its nodes make, without their bodies."""
    declared = (*graph.input, *graph.initializer, *(sparse.values for sparse in graph.sparse_initializer))
    return {*positions_of(graph.node), *(entry.name for entry in declared)}


def _from_outside(graph: GraphProto) -> list[str]:
    read = [name for node in graph.node for name in reads_of(node)]
    own = own_names(graph)
    return [name for name in (*read, *(output.name for output in graph.output)) if name not in own]


def live_nodes(graph: GraphProto, *, by_values: bool = False) -> list[NodeProto]:
    """The nodes that an output depends on, last first. onnxoptimizer's fusions do not remove the others.

    Args:
        graph: the graph, with its outputs.
        by_values: leave out nodes of which only the shape matters, or whose result does not (times zero).
    """
    wanted = {output.name for output in graph.output}
    zeros = _zeros(graph) if by_values else set()
    live = []
    for node in reversed(list(graph.node)):  # indexing the protobuf field is slower
        if not wanted.isdisjoint(node.output):
            live.append(node)
            if not (by_values and (node.op_type in SIZES or _is_constant(node, zeros))):
                wanted.update(reads_of(node))
    return live


def _is_constant(node: NodeProto, zeros: AbstractSet[str]) -> bool:
    """Whether a node's result does not depend on its input: zero times x, x less x, x to the power of zero."""
    if node.domain not in ONNX_DOMAINS:
        return False
    if node.op_type in ("Mul", "And"):
        return not zeros.isdisjoint(node.input)
    if node.op_type in ("Sub", "Xor"):
        return node.input[0] == node.input[1]
    return node.op_type == "Pow" and node.input[1] in zeros


def _zeros(graph: GraphProto) -> set[str]:
    """The constants that are zero, as far as they are small."""
    tensors = [(tensor.name, tensor) for tensor in graph.initializer]
    found = set()
    for node in graph.node:
        if node.domain in ONNX_DOMAINS:  # of its operators only Constant and ConstantOfShape have tensors
            tensors += [(node.output[0], attribute.t) for attribute in node.attribute if attribute.HasField("t")]
            found.update(
                node.output[0] for attribute in node.attribute if attribute.name == "value_float" and attribute.f == 0
            )
    for name, tensor in tensors:
        is_known = tensor.data_location != TensorProto.EXTERNAL and tensor.data_type in KNOWN_TYPES
        if is_known and prod(tensor.dims) <= SMALL and not numpy_helper.to_array(tensor).any():
            found.add(name)
    return found


SMALL: Final = 16
"""Larger constants are not examined; they may be external data."""

KNOWN_TYPES: Final = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BOOL})


def put_in_order(model: onnx.ModelProto) -> None:
    """Sort the nodes in place, give each a name of its own, and write ONNX's own domain as "", which ONNX's shape
    inference alone knows: "ai.onnx" is another name of it."""
    sort_nodes(model.graph)
    rename_twins(model.graph)
    for named in _named_in_full(model):
        named.domain = ""


def is_in_order(model: onnx.ModelProto) -> bool:
    """Whether the nodes are sorted, and ONNX's own domain is "", as `put_in_order` leaves them."""
    graphs = every_graph(model.graph)
    is_sorted = all(topological_order(graph.node) == list(range(len(graph.node))) for graph in graphs)
    return is_sorted and not any(_named_in_full(model))


def _named_in_full(model: onnx.ModelProto) -> Iterator[NodeProto | onnx.OperatorSetIdProto]:
    """The nodes and the imports with "ai.onnx" as their domain."""
    for part in (model, *model.functions):
        yield from (entry for entry in part.opset_import if entry.domain == ONNX_DOMAINS[1])
    for graph in (model.graph, *model.functions):
        yield from (node for node in every_node(graph) if node.domain == ONNX_DOMAINS[1])


def sort_nodes(graph: onnx.GraphProto) -> None:
    """Sort the nodes of `graph` and of its subgraphs in place; nodes that are in order keep their order.

    A circle is left as it is: onnxruntime refuses it by name.
    """
    for node in graph.node:
        for body in bodies_in(node):
            sort_nodes(body)
    order = topological_order(graph.node)
    if order == list(range(len(graph.node))) or len(order) < len(graph.node):
        return
    nodes = [graph.node[index] for index in order]
    moved = onnx.GraphProto(node=nodes)  # a copy, since clearing the field frees the nodes
    del graph.node[:]
    graph.node.extend(moved.node)


def rename_twins(graph: onnx.GraphProto) -> None:
    """Give each node that has the name of a node before it a name of its own, in place: `n_2`, `n_3` after `n`.

    ONNX asks for it, old exporters do not do it, and onnxruntime refuses two nodes of one name.
    """
    for inner in every_graph(graph):
        taken = {node.name for node in inner.node}
        numbers = Counter[str]()
        for node in inner.node:
            name = node.name
            numbers[name] += 1
            while name and numbers[name] > 1 and node.name in taken:
                node.name = f"{name}_{numbers[name]}"
                numbers[name] += node.name in taken


def inline_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` without local functions; itself where it has none. The values of its own graph keep their names.

    Raises:
        ModelError: onnx cannot inline them: calls are too deep inside of each other, say.
    """
    model = inline_layers(model)
    if not model.functions:
        return model
    try:
        return inliner.inline_local_functions(_give_defaults(model))
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"onnx cannot inline the model's {len(model.functions):,} functions: {reason}") from error


def _give_defaults(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model`, whose calls have the attributes that their functions declare with a default: ONNX's inliner forgets
    those that a call leaves out, and the node in the body then has the default of its operator."""
    defaults = {(function.domain, function.name, function.overload): function for function in model.functions}
    if not any(function.attribute_proto for function in model.functions):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for part in (copy.graph, *copy.functions):
        for node in every_node(part):
            function = defaults.get((node.domain, node.op_type, node.overload))
            given = {attribute.name for attribute in node.attribute}
            missing = function.attribute_proto if function is not None else ()
            node.attribute.extend(attribute for attribute in missing if attribute.name not in given)
    return copy


def without_sparse(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` with dense initializers and Constants in place of the sparse ones; itself where it has none.

    Args:
        model: its sparse tensors have passed the door (passes/load), which has seen that they fit into memory; no
            function of it holds a sparse Constant.
    """
    graphs = [graph for graph in every_graph(model.graph) if graph.sparse_initializer]
    if not graphs and not any(map(is_sparse, every_node(model.graph))):
        return model
    dense = onnx.ModelProto()
    dense.CopyFrom(model)
    for graph in every_graph(dense.graph):
        graph.initializer.extend(map(dense_of, graph.sparse_initializer))
        del graph.sparse_initializer[:]
    for node in filter(is_sparse, every_node(dense.graph)):
        (attribute,) = node.attribute
        attribute.CopyFrom(onnx.helper.make_attribute("value", dense_of(attribute.sparse_tensor)))
    return dense


def is_sparse(node: NodeProto) -> bool:
    """Whether a node is a Constant with a sparse tensor."""
    return node.op_type == "Constant" and any(attribute.name == "sparse_value" for attribute in node.attribute)


def dense_of(sparse: onnx.SparseTensorProto) -> TensorProto:
    """The dense tensor of a sparse one, with its name: zero where it names no element."""
    values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    dense = np.zeros(sparse.dims, values.dtype)
    flat = indices if indices.ndim == 1 else np.ravel_multi_index(tuple(indices.T), tuple(sparse.dims))
    dense.reshape(-1)[flat] = values
    return numpy_helper.from_array(dense, sparse.values.name)


def topological_order(nodes: Sequence[NodeProto]) -> list[int]:
    """The indices of `nodes` in topological order, smallest first; nodes on a cycle or after one are left out."""
    needs = producers_read(nodes)
    if all(max(before, default=-1) < index for index, before in enumerate(needs)):
        return list(range(len(needs)))
    waiting, consumers = Counter({index: len(before) for index, before in enumerate(needs)}), defaultdict(list)
    for index, before in enumerate(needs):
        for producer in before:
            consumers[producer].append(index)
    ready = [index for index, before in enumerate(needs) if not before]
    order = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for consumer in consumers[index]:
            waiting[consumer] -= 1
            if not waiting[consumer]:
                heapq.heappush(ready, consumer)
    return order


Value = TypeVar("Value", bound=Hashable)
Source = TypeVar("Source")


def walk(starts: Iterable[Value], onwards: Callable[[Value], Iterable[Value]]) -> Iterator[Value]:
    """Everything that is reached from `starts`, each once, `starts` included; a circle is walked once."""
    seen: set[Value] = set()
    front = list(starts)
    while front:
        value = front.pop()
        if value not in seen:
            seen.add(value)
            yield value
            front.extend(onwards(value))


class NearestSources(Generic[Value, Source]):
    """The nearest sources of values: a search up the graph that expands each value once, however many values share it.

    Args:
        expand: value → (the sources at this value, each under a key; the values that it is computed from). A value is
            whatever the caller searches by, such as a name, or a name with an axis. Equal keys are one source. Values
            may form cycles.
        most: how many of the nearest sources are kept for each value.
    """

    def __init__(
        self, expand: Callable[[Value], tuple[Mapping[Hashable, Source], Sequence[Value]]], most: int = 32
    ) -> None:
        # A search that holds this object has `expand` as a method: a circle, in which its model would stay.
        self._expand = WeakMethod(expand) if isinstance(expand, MethodType) else lambda: expand
        self._most = most
        self._open: dict[Value, tuple[Mapping[Hashable, Source], Sequence[Value]]] = {}
        self._found: dict[Value, dict[Hashable, tuple[int, Source]]] = {}

    @property
    def visits(self) -> int:
        """How many values were expanded."""
        return len(self._open)

    def of(self, value: Value) -> list[Source]:
        """The sources of `value`."""
        if value not in self._found:
            self._find(self._order(value))
        return [source for _, source in self._found[value].values()]

    def _before(self, value: Value) -> Sequence[Value]:
        if value not in self._open:
            expand = self._expand()
            assert expand is not None, "the search lives while it asks"
            self._open[value] = expand(value)
        return self._open[value][1]

    def _order(self, value: Value) -> list[Value]:
        """`value` and the values it is computed from whose sources are not known yet, producers first."""
        order, entered = [], {value}
        stack = [(value, iter(self._before(value)))]
        while stack:
            top, rest = stack[-1]
            for before in rest:
                if before not in entered and before not in self._found:
                    entered.add(before)
                    stack.append((before, iter(self._before(before))))
                    break
            else:
                stack.pop()
                order.append(top)
        return order

    def _find(self, order: Sequence[Value]) -> None:
        """Find the sources of the values in `order`; in a cycle, such as a state, until no source is nearer."""
        is_circular = False
        for value in order:
            is_circular = is_circular or any(before not in self._found for before in self._before(value))
            self._found[value] = self._join(value)
        for _ in order if is_circular else ():
            is_settled = True
            for value in order:
                known = self._join(value)
                is_settled = is_settled and known == self._found[value]
                self._found[value] = known
            if is_settled:
                return

    def _join(self, value: Value) -> dict[Hashable, tuple[int, Source]]:
        """Key → distance and source, of the nearest sources."""
        own, values = self._open[value]
        found = {key: (0, source) for key, source in own.items()}
        for before in dict.fromkeys(values):
            for key, (distance, source) in self._found.get(before, {}).items():
                if key not in found or distance + 1 < found[key][0]:
                    found[key] = distance + 1, source
        if len(values) > 1:
            found = dict(sorted(found.items(), key=lambda entry: entry[1][0])[: self._most])
        return found


def group_linked(links: Iterable[Sequence[int]]) -> list[list[int]]:
    """The groups of integers that `links` connect, directly or through others: sorted, in the order of their first."""
    parent: dict[int, int] = {}

    def root(number: int) -> int:
        parent.setdefault(number, number)
        while parent[number] != number:
            parent[number] = number = parent[parent[number]]
        return number

    for first, *others in links:
        root(first)
        for number in others:
            parent[root(number)] = root(first)
    groups: dict[int, list[int]] = defaultdict(list)
    for number in sorted(parent):
        groups[root(number)].append(number)
    return list(groups.values())


@contextlib.contextmanager
def pause_collector() -> Iterator[None]:
    """Stop Python's garbage collector in this block: it would visit all objects of a large model repeatedly, or destroy
    what must stay while a GPU records."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def freeze_objects() -> Iterator[None]:
    """Let Python's garbage collector visit only objects that this block makes: libraries have a million others."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
