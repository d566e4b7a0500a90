"""Put optimized pieces back into the graph from which they were cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from passes.graph.index import GraphIndex, copy_of, free_name, initializers_of
from passes.graph.traversal import sort_nodes

DOMAIN: Final = "onnxline"
ENTERS: Final = "Enters"
LEAVES: Final = "Leaves"
BORROWED: Final = "onnxline.borrowed/"
"""The beginning of the name of a Constant that another piece holds."""
OUTSIDE: Final = "/outside"
"""The end of the name of a value that only a piece has."""


def let_in(piece: ModelProto, name: str) -> None:
    """Have a value of the graph outside enter a piece by a node: at a graph input a pass may give up, or abort."""
    outside = f"{name}{OUTSIDE}"
    piece.graph.input.add(name=outside)
    piece.graph.node.add(domain=DOMAIN, op_type=ENTERS, name=name, input=[outside], output=[name])


def borrow(piece: ModelProto, constant: NodeProto) -> None:
    """Add a copy of a Constant from outside to a piece."""
    copy = piece.graph.node.add()
    copy.CopyFrom(constant)
    copy.name = f"{BORROWED}{constant.output[0]}"


def let_out(piece: ModelProto, name: str) -> None:
    """Have a value leave a piece by a node: a pass cannot replace an output by another value."""
    outside = f"{name}{OUTSIDE}"
    piece.graph.output.add(name=outside)
    piece.graph.node.add(domain=DOMAIN, op_type=LEAVES, name=name, input=[name], output=[outside])


def content_of(tensor: TensorProto) -> bytes:
    """What a stored tensor is, without its name and the texts on it, which the library drops."""
    bare = copy_of(tensor)
    for text in ("name", "doc_string", "metadata_props"):
        bare.ClearField(text)
    return bare.SerializeToString(deterministic=True)


class ModelAssembler:
    """Builds a model from `source` by replacing nodes and initializers."""

    def __init__(self, source: ModelProto) -> None:
        self._source = source
        graph = source.graph
        self._nodes: list[list[NodeProto]] = [[node] for node in graph.node]
        """Position in the source → the nodes that replace the source's node in the result."""
        index = GraphIndex(graph)
        self._stored = dict(index.initializers)
        self._dropped: set[str] = set()
        self._infos: dict[str, ValueInfoProto] = {info.name: info for info in graph.value_info}
        self._known = {name for node in graph.node for name in (*node.input, *node.output)}
        self._fixed = index.inputs.keys() | index.outputs.keys() | self._stored.keys()
        self._known |= self._fixed
        self._outputs = index.outputs.keys()
        self._read_instead: dict[str, str] = {}
        """Value of the source → the value that nodes read instead."""
        self._output_names: dict[str, str] = {}
        """Value of the source → its name as the output of its producer."""

    def replace(self, positions: Sequence[int], names: frozenset[str], optimized: ModelProto) -> None:
        """Replace the nodes of a piece.

        Args:
            positions: the positions of the nodes in the source.
            names: the names of the values that the piece had before it was optimized.
            optimized: the piece after that.
        """
        inside = {name for position in positions for node in self._nodes[position] for name in node.output}
        for position in positions:
            self._nodes[position] = []
        fresh = self._fresh_names(names, optimized.graph)
        nodes = self._nodes[positions[0]]
        for node in optimized.graph.node:
            if node.name.startswith(BORROWED):
                continue
            if node.domain == DOMAIN:
                if node.op_type == LEAVES:
                    self._leave(node.name, fresh.get(node.input[0], node.input[0]))
                else:
                    self._enter(node.name, node.output[0], nodes)
                continue
            node.input[:] = [fresh.get(name, name) for name in node.input]
            node.output[:] = [fresh.get(name, name) for name in node.output]
            nodes.append(node)
        has = initializers_of(optimized.graph)
        self._dropped |= {name for name in names if name in self._stored and name not in has}
        for tensor in optimized.graph.initializer:
            if tensor.name in fresh or tensor.name in inside:  # the second: of a Constant
                tensor.name = fresh.get(tensor.name, tensor.name)
                self._stored[tensor.name] = tensor
        for info in optimized.graph.value_info:
            if info.name in fresh:
                info.name = fresh[info.name]
                self._infos[info.name] = info

    def read_instead(self, stays: Mapping[str, str]) -> None:
        """Let nodes read one of several equal initializers, and drop the others.

        Args:
            stays: initializer to drop → the initializer that is read instead.
        """
        self._read_instead.update(stays)
        self._dropped |= stays.keys()

    def build(self) -> ModelProto:
        """The model with all replacements, its nodes in order of execution."""
        graph = copy_of(self._source.graph)
        for several in (graph.node, graph.initializer, graph.value_info):
            del several[:]
        for node in (node for nodes in self._nodes for node in nodes):
            copy = graph.node.add()
            copy.CopyFrom(node)
            copy.input[:] = [self._name_to_read(name) for name in node.input]
            copy.output[:] = [self._output_names.get(name, name) for name in node.output]
        index = GraphIndex(graph)
        graph.initializer.extend(
            tensor for name, tensor in self._stored.items() if name in index.reads or name not in self._dropped
        )
        graph.value_info.extend(
            info for name, info in self._infos.items() if name in index.producers and name not in self._outputs
        )
        sort_nodes(graph)
        model = copy_of(self._source)
        model.graph.CopyFrom(graph)
        return model

    def _fresh_names(self, names: frozenset[str], graph: GraphProto) -> dict[str, str]:
        """Names for the values that a pass has made: other pieces may have called theirs the same."""
        fresh: dict[str, str] = {}
        has = [name for node in graph.node for name in (*node.input, *node.output)]
        changed = {tensor.name for tensor in graph.initializer if self._is_changed(tensor)}
        for name in dict.fromkeys((*has, *(tensor.name for tensor in graph.initializer))):
            if name and (name not in names or name in changed):
                fresh[name] = free_name(name, self._known, 1)
                self._known.add(fresh[name])
        return fresh

    def _is_changed(self, tensor: TensorProto) -> bool:
        before = self._stored.get(tensor.name)
        return before is not None and content_of(before) != content_of(tensor)

    def position_of(self, position: int) -> int:
        """The position in the result of the first node at or after `position` in the source."""
        return sum(map(len, self._nodes[:position]))

    def _leave(self, name: str, inside: str) -> None:
        """Rename the piece's output `name` to `inside`."""
        if inside != name:
            self._read_instead[name] = inside

    def _enter(self, source: str, inside: str, nodes: list[NodeProto]) -> None:
        """Connect the piece's input `inside` to the value `source`; an output of the graph keeps its name."""
        if inside == source:
            return
        if inside not in self._outputs:
            self._read_instead[inside] = source
        elif source not in self._fixed and source not in self._output_names:
            self._read_instead[source] = self._output_names[source] = inside
        else:  # an input cannot be an output under another name
            nodes.append(NodeProto(op_type="Identity", input=[source], output=[inside]))

    def _name_to_read(self, name: str) -> str:
        seen = {name}
        while name in self._read_instead and self._read_instead[name] not in seen:
            name = self._read_instead[name]
            seen.add(name)
        return name
