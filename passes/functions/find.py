"""Find equal layers: torch modules of one list whose nodes do the same, on values and weights of the same types.

Layers are found by the module paths that torch's exporter writes: `model.layers.0`, `model.layers.1`. The nodes of a
layer are those that depend on an input of the graph. Two other kinds of node belong to no layer:

    plain     computed from small constants alone, which are the same for each layer: copied into a function
    stored    computed from weights alone, such as a transposed matrix: an argument of a function, like a weight itself,
              so that it can be folded for each layer; nodes of its layer where weights are not to be read
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Final

from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, numpy_helper

from passes.graph.index import GraphIndex, computed_values, constant_of, copy_of
from passes.graph.op_facts import has_body, is_opaque
from passes.graph.traversal import reads_of
from passes.model.canonical import digest_of_parts
from passes.provenance.annotations import ModulePath, module_path_of

FEWEST_NODES: Final = 4
"""The fewest nodes of a layer that becomes a function: fewer are no shorter as a call."""

SMALL: Final = 16
"""The most elements of a constant that is compared by its values, and copied into a function."""


@dataclass(frozen=True, slots=True)
class LayerNodes:
    """One layer of a graph: the nodes that depend on an input, by their positions."""

    module: ModulePath
    nodes: tuple[int, ...]
    inputs: tuple[str, ...]
    """Values that its nodes read and do not make, without plain ones, in the order in which they are first read."""

    @property
    def path(self) -> str:
        return self.module.paths[-1]


@dataclass(frozen=True, slots=True)
class EqualLayers:
    """Two or more layers whose nodes are equal one by one, and the positions, in a layer, of its outputs."""

    layers: tuple[LayerNodes, ...]
    outputs: tuple[tuple[int, int], ...]
    """(index of the node in `LayerNodes.nodes`, index of its output)."""


@dataclass
class ConstantFacts:
    """Which values of a graph are plain, and which are stored; see the top of the file."""

    index: GraphIndex
    plain: dict[str, str] = field(default_factory=dict)
    """Plain value → what identifies it."""
    stored: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, index: GraphIndex) -> ConstantFacts:
        facts = cls(index)
        for name, tensor in index.initializers.items():
            facts._note(name, tensor)
        for node in index.nodes:
            facts._note_node(node)
        return facts

    def _note(self, name: str, tensor: TensorProto) -> None:
        is_weight = "." in name  # of a module: torch's names of parameters and buffers are dotted paths
        if is_weight or name in self.index.inputs or not is_small(tensor):
            self.stored.add(name)
        else:
            self.plain[name] = digest_of_parts(tensor.data_type, *tensor.dims, numpy_helper.to_array(tensor).tobytes())

    def _note_node(self, node: NodeProto) -> None:
        tensor = constant_of(node)
        if tensor is not None:
            self._note(node.output[0], tensor)
            return
        if is_opaque(node) or not all(name in self.plain or name in self.stored for name in node.input if name):
            return
        if any(name in self.stored for name in node.input):
            self.stored.update(node.output)
            return
        digest = digest_of_parts(*operation_of(node), *(self.plain.get(name, "") for name in node.input))
        self.plain.update({name: f"{digest}.{at}" for at, name in enumerate(node.output)})


def is_small(tensor: TensorProto) -> bool:
    """Whether a tensor is compared by its values: a shape, an axis or a scale."""
    return tensor.data_location != TensorProto.EXTERNAL and prod(tensor.dims) <= SMALL


def find_equal_layers(graph: GraphProto, *, unread: bool = False) -> list[EqualLayers]:
    """The layers of `graph` that are equal to others, those of the outermost lists of modules first.

    Args:
        graph: a graph whose nodes have the module paths of torch's exporter.
        unread: weights are not to be read, so that nothing can be folded from them.
    """
    return list(_LayerFinder(graph, unread).find())


@dataclass
class _LayerFinder:
    graph: GraphProto
    unread: bool
    taken: set[int] = field(default_factory=set)
    """The positions of nodes that are in a layer already."""

    @cached_property
    def index(self) -> GraphIndex:
        return GraphIndex(self.graph)

    @cached_property
    def facts(self) -> ConstantFacts:
        return ConstantFacts.of(self.index)

    def find(self) -> Iterator[EqualLayers]:
        lists = self._find_lists()
        for parent in sorted(lists, key=lambda path: (path.count("."), path)):
            equal: dict[object, list[LayerNodes]] = defaultdict(list)
            for module, positions in lists[parent].items():
                free = [position for position in positions if position not in self.taken]
                if len(free) < max(FEWEST_NODES, len(positions)):
                    continue
                layer = self._make_layer(module, free)
                if self._is_whole(layer):
                    equal[self._describe_layer(layer)].append(layer)
            for layers in equal.values():
                if len(layers) > 1:
                    self.taken.update(position for layer in layers for position in layer.nodes)
                    yield EqualLayers(tuple(layers), self._find_outputs(layers))

    def _find_lists(self) -> dict[str, dict[ModulePath, list[int]]]:
        """Path of a list of modules → each of its modules, with the positions of its nodes."""
        lists: dict[str, dict[str, tuple[ModulePath, list[int]]]] = defaultdict(dict)
        for position, node in enumerate(self.index.nodes):
            module = None if self._is_constant(node) else module_path_of(node)
            for depth, path in enumerate(module.paths if module else ()):
                parent, _, last = path.rpartition(".")
                if module is not None and last.isdecimal():
                    whole = ModulePath(module.paths[: depth + 1], module.classes[: depth + 1], ())
                    lists[parent].setdefault(path, (whole, []))[1].append(position)
        return {parent: dict(modules.values()) for parent, modules in lists.items()}

    def _is_constant(self, node: NodeProto) -> bool:
        plain, stored = self.facts.plain, self.facts.stored
        is_stack = node.op_type == "Concat" and stored.issuperset(node.input)  # `passes.weights.weight_stacks`
        return all(name in plain or (name in stored and (is_stack or not self.unread)) for name in node.output if name)

    def _make_layer(self, module: ModulePath, positions: Sequence[int]) -> LayerNodes:
        nodes = [self.index.nodes[position] for position in positions]
        made = computed_values(nodes)
        read = dict.fromkeys(name for node in nodes for name in node.input if name)
        inputs = tuple(name for name in read if name not in made and name not in self.facts.plain)
        return LayerNodes(module, tuple(positions), inputs)

    def _is_whole(self, layer: LayerNodes) -> bool:
        """Whether a call can compute the layer: no value leaves it and comes back, and no node has a body."""
        nodes, inside = self.index.nodes, set(layer.nodes)
        if any(has_body(nodes[position]) or is_opaque(nodes[position]) for position in inside):
            return False
        made: set[str] = set()
        after: set[str] = set()
        for position in range(layer.nodes[0], layer.nodes[-1] + 1):
            node = nodes[position]
            if position in inside:
                if not after.isdisjoint(node.input):
                    return False
                made.update(node.output)
            elif not (made | after).isdisjoint(reads_of(node)):
                after.update(node.output)
        return True

    def _describe_layer(self, layer: LayerNodes) -> object:
        """A key that equal layers share: class, operations, types, and which node reads which value, without names."""
        place = {name: ("in", at) for at, name in enumerate(layer.inputs)}
        described = []
        for at, position in enumerate(layer.nodes):
            node = self.index.nodes[position]
            reads = tuple(place.get(name) or self.facts.plain.get(name, "") for name in node.input)
            described.append((operation_of(node), reads, tuple(map(self._describe_type, node.output))))
            place.update({name: (at, number) for number, name in enumerate(node.output)})  # type: ignore[misc]
        return layer.module.classes[-1:], tuple(described), tuple(map(self._describe_type, layer.inputs))

    def _describe_type(self, name: str) -> object:
        tensor = self.index.initializers.get(name)
        if tensor is not None:
            return "stored", tensor.data_type, tuple(tensor.dims)
        info = self.index.types.get(name)
        return name in self.facts.stored, b"" if info is None else info.type.SerializeToString(deterministic=True)

    def _find_outputs(self, layers: Sequence[LayerNodes]) -> tuple[tuple[int, int], ...]:
        """The outputs that a node outside of its layer reads, or that the graph gives, in any of `layers`."""
        found = set()
        for layer in layers:
            inside = set(layer.nodes)
            for at, position in enumerate(layer.nodes):
                for number, name in enumerate(self.index.nodes[position].output):
                    if name in self.index.outputs or not inside.issuperset(self.index.readers[name]):
                        found.add((at, number))
        return tuple(sorted(found))


def operation_of(node: NodeProto) -> tuple[object, ...]:
    """Operator, attributes and outputs of a node, without names."""
    attributes = tuple(sorted(_without_names(attribute) for attribute in node.attribute))
    return node.domain, node.op_type, getattr(node, "overload", ""), attributes, tuple(map(bool, node.output))


def _without_names(attribute: AttributeProto) -> bytes:
    if attribute.doc_string or attribute.t.name:
        attribute = copy_of(attribute)
        attribute.ClearField("doc_string")
        if attribute.HasField("t"):
            attribute.t.ClearField("name")
    return attribute.SerializeToString(deterministic=True)
