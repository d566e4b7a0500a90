"""Run passes of onnxoptimizer on pieces of a large graph, since the time of a call grows with the square of its nodes.

The library compares the name of each value that it reads with all others. Its passes look at a node and its
neighbours, so they find the same in a piece with some neighbourhood as in the whole:

    windows     the graph in its own order, cut where the fewest values cross
    seams       the nodes around each of these cuts
    duplicates  nodes that compute the same, wherever they are: all that `eliminate_common_subexpression` looks at
    equals      equal initializers: all that `eliminate_duplicate_initializer` looks at

What enters a piece comes out of a node of an operator that no pass knows, and what leaves it goes into one, so a pass
can do less at a cut than inside, and nothing wrong. In the worker.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, TypeVar

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from passes.graph.index import GraphIndex, copy_of, free_name, initializers_of, value_names, values_read
from passes.graph.op_facts import first_output, has_body
from passes.graph.traversal import group_linked, sort_nodes

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
        self._known = value_names(graph)
        self._fixed = index.inputs.keys() | index.outputs.keys() | self._stored.keys()
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


Content = TypeVar("Content")

Optimize = Callable[[bytes, Sequence[str]], bytes]

WHOLE_NODES: Final = 1000
"""A graph of at most this many nodes is not cut: quadratic time does not matter there."""

WINDOW: Final = 160
"""Nodes of a piece at least; up to half as many more, to cut where fewer values cross."""

SEAM: Final = 32
"""Nodes on either side of a cut that are looked at again."""

Cut = Callable[[Sequence[int], int], list[range]]
"""(positions to cut at, number of nodes) → the positions of each piece."""

DEAD_END: Final = "eliminate_deadend"
EXTRACT: Final = "extract_constant_to_initializer"
DUPLICATES: Final = "eliminate_common_subexpression"
EQUALS: Final = "eliminate_duplicate_initializer"


def can_be_cut(model: ModelProto) -> bool:
    """Whether a model is large, and made of nothing but plain nodes and tensors."""
    graph = model.graph
    if len(graph.node) <= WHOLE_NODES or model.functions or graph.sparse_initializer:
        return False
    return not any(map(has_body, graph.node))


class GraphPieces:
    """A graph with the pieces that it is cut into.

    Args:
        model: left as it is.
        optimize: the library: a serialized model and names of passes → the result.
        cuts: positions between which the windows lie; chosen here by default.
    """

    def __init__(self, model: ModelProto, optimize: Optimize, cuts: Sequence[int] = ()) -> None:
        self.model = model
        self._given_cuts = cuts
        self._optimize = optimize
        self._cut: dict[object, list[_Piece]] = {}
        """The pieces that were asked for: most passes change nothing, and the next one is given the same."""
        index = GraphIndex(model.graph)
        self._nodes, self._producers, self._stored = index.nodes, index.positions, index.initializers
        self._index = index
        self._consumers = {name: [position for position, _ in uses] for name, uses in index.uses.items()}
        self._infos = {info.name: info for info in (*model.graph.value_info, *model.graph.output)}
        self._inputs, self._outputs = index.inputs, index.outputs

    def run(self, names: Sequence[str]) -> GraphPieces | None:
        """Run passes in order on each piece; returns the new graph, or None when they change nothing."""
        now = self
        for cut in (_windows, _seams):
            pieces = now._pieces(cut, live=DEAD_END in names, borrows=EXTRACT not in names)
            now = now._replace_pieces(pieces, [piece.run(names, self._optimize) for piece in pieces])
        if DUPLICATES in names:
            pieces = [now._piece(group, now._nodes_alive(False)) for group in now._group_duplicates()]
            now = now._replace_pieces(pieces, [piece.run([DUPLICATES], self._optimize) for piece in pieces])
        if EQUALS in names:
            now = now._merge_equal_initializers()
        return None if now is self else now

    def _replace_pieces(self, pieces: Sequence[_Piece], results: Sequence[bytes | None]) -> GraphPieces:
        if not any(results):
            return self
        assembler = ModelAssembler(self.model)
        for piece, result in zip(pieces, results, strict=True):
            if result is not None:
                assembler.replace(piece.positions, piece.names, onnx.load_from_string(result))
        return GraphPieces(assembler.build(), self._optimize, [assembler.position_of(cut) for cut in self._cuts])

    def _pieces(self, cut: Cut, *, live: bool, borrows: bool) -> list[_Piece]:
        key = (cut, live, borrows)
        if key not in self._cut:
            alive = self._nodes_alive(live)
            groups = cut(self._cuts, len(self._nodes))
            pieces = [
                self._piece(group, alive, borrows=borrows, with_unread=number == 0)
                for number, group in enumerate(groups)
            ]
            self._cut[key] = pieces
        return self._cut[key]

    @cached_property
    def _cuts(self) -> list[int]:
        """Places between which the windows lie, without the two ends of the graph."""
        if self._given_cuts:
            return list(self._given_cuts)
        crossing = self._index.crossing
        cuts, begun = [], 0
        while len(self._nodes) - begun > WINDOW * 3 // 2 + SEAM:
            begun = min(range(begun + WINDOW, begun + WINDOW * 3 // 2), key=lambda position: crossing[position])
            cuts.append(begun)
        return cuts

    def _nodes_alive(self, live: bool) -> Collection[int]:
        """The nodes that count as consumers of a value; with `live` only nodes that an output depends on."""
        nodes = range(len(self._nodes))
        return {self._producers[first_output(node)] for node in self._index.live} if live else nodes

    def _piece(
        self, group: Collection[int], alive: Collection[int], *, borrows: bool = True, with_unread: bool = False
    ) -> _Piece:
        proto = ModelProto(ir_version=self.model.ir_version, opset_import=self.model.opset_import)
        proto.graph.name = "piece"
        positions = sorted(group)
        nodes = [self._nodes[position] for position in positions]
        inside = set(positions)

        def is_read_elsewhere(name: str) -> bool:
            return any(position not in inside and position in alive for position in self._consumers.get(name, ()))

        read = values_read(nodes)
        for name in read:
            self._enter(proto, name, borrows=borrows)
        if with_unread:
            proto.graph.initializer.extend(
                tensor
                for name, tensor in self._stored.items()
                if name not in self._consumers and name not in self._outputs
            )
        proto.graph.node.extend(nodes)
        # How often a value is read decides what some passes do, so the others that read it are there, too.
        for name in read:
            if name in self._outputs or is_read_elsewhere(name):
                let_out(proto, name)
        for name in (name for node in nodes for name in node.output if name):
            info = self._infos.get(name) or ValueInfoProto(name=name)
            if name in self._outputs:
                proto.graph.output.append(info)
                continue
            if name in self._infos:
                proto.graph.value_info.append(info)
            if is_read_elsewhere(name):
                let_out(proto, name)
        return _Piece(proto.SerializeToString(), tuple(positions), frozenset(value_names(proto.graph)))

    def _enter(self, proto: ModelProto, name: str, *, borrows: bool) -> None:
        """Give a piece a value that it reads and does not make."""
        if name in self._inputs:
            proto.graph.input.append(self._inputs[name])
        if name in self._stored:
            proto.graph.initializer.append(self._stored[name])
        producer = self._nodes[self._producers[name]] if name in self._producers else None
        if producer is None:
            return
        if borrows and producer.op_type == "Constant":
            borrow(proto, producer)
            return
        let_in(proto, name)
        if name in self._infos:
            proto.graph.value_info.append(self._infos[name])

    def _group_duplicates(self) -> list[list[int]]:
        """Groups of nodes that compute the same, each with the other such nodes that it is computed from."""
        numbers: dict[object, int] = {}
        value_numbers: dict[str, int] = {}
        classes: dict[int, list[int]] = defaultdict(list)
        for name, tensor in self._stored.items():
            value_numbers[name] = numbers.setdefault(content_of(tensor), len(numbers))
        for position, node in enumerate(self._nodes):
            attributes = tuple(sorted(attribute.SerializeToString(deterministic=True) for attribute in node.attribute))
            read = tuple(value_numbers.get(name, name) for name in node.input)
            number = numbers.setdefault((node.domain, node.op_type, attributes, read, len(node.output)), len(numbers))
            value_numbers.update({name: (number, index) for index, name in enumerate(node.output)})  # type: ignore[misc]
            classes[number].append(position)
        duplicates = {position for positions in classes.values() if len(positions) > 1 for position in positions}
        links = [positions for positions in classes.values() if len(positions) > 1]
        for position in duplicates:
            producers = (self._producers.get(name, -1) for name in self._nodes[position].input)
            links.append([position, *(producer for producer in producers if producer in duplicates)])
        return [[position for group in batch for position in group] for batch in _batches(group_linked(links), WINDOW)]

    def _merge_equal_initializers(self) -> GraphPieces:
        """Ask the library which of equal initializers stays: each is read by a node of its own."""
        groups: dict[bytes, list[TensorProto]] = defaultdict(list)
        for name, tensor in self._stored.items():
            if name in self._consumers and name not in self._inputs and name not in self._outputs:
                groups[content_of(tensor)].append(tensor)
        stays: dict[str, str] = {}
        waiting = [tensors for tensors in groups.values() if len(tensors) > 1]
        for batch in _batches(waiting, WINDOW):
            result = self._optimize(_read_alone(self.model, batch), [EQUALS])
            for node in onnx.load_from_string(result).graph.node:
                if node.input[0] != node.name:
                    stays[node.name] = node.input[0]
        if not stays:
            return self
        assembler = ModelAssembler(self.model)
        assembler.read_instead(stays)
        return GraphPieces(assembler.build(), self._optimize, self._cuts)


@dataclass(slots=True)
class _Piece:
    """One piece: `positions` are those of its nodes in the graph, `names` the names of all its values."""

    source: bytes
    positions: tuple[int, ...]
    names: frozenset[str]
    _is_written: bool = False
    """Whether `source` is in the form in which the library writes a model."""
    _idle: set[tuple[str, ...]] = field(default_factory=set)

    def run(self, names: Sequence[str], optimize: Optimize) -> bytes | None:
        """Run passes on the piece; None when they change nothing."""
        key = tuple(names)
        if key in self._idle:
            return None
        content = optimize(self.source, names)
        if content != self.source and not self._is_written:
            self.source, self._is_written = optimize(self.source, ["nop"]), True
        if content != self.source:
            return content
        self._idle.add(key)
        return None


def _windows(cuts: Sequence[int], count: int) -> list[range]:
    return [range(first, last) for first, last in itertools.pairwise((0, *cuts, count))]


def _seams(cuts: Sequence[int], count: int) -> list[range]:
    return [range(max(0, cut - SEAM), min(count, cut + SEAM)) for cut in cuts]


def _batches(groups: Sequence[list[Content]], size: int) -> Iterator[list[list[Content]]]:
    batch: list[list[Content]] = []
    for group in groups:
        if batch and sum(map(len, batch)) + len(group) > size:
            yield batch
            batch = []
        batch.append(group)
    if batch:
        yield batch


def _read_alone(model: ModelProto, groups: Sequence[Sequence[TensorProto]]) -> bytes:
    proto = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    proto.graph.name = "equals"
    for tensor in itertools.chain(*groups):
        proto.graph.initializer.append(tensor)
        let_out(proto, tensor.name)
    return proto.SerializeToString()
