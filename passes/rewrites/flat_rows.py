"""Compute rows in a matrix where their consumers want a matrix: [batch, length, width] as [batch · length, width].

A Gemm reads and writes matrices, so a Reshape stands before it and after it, while sums, curves and norms between two
Gemms do the same to each row, whatever the axes before it. A **region** is a connected part of such operators. All of
it computes with matrices if that leaves fewer nodes: Reshapes at its ends go or come, and each MatMul whose bias an Add
brings becomes one Gemm. Of equally many nodes, matrices with Gemms are taken: a Reshape computes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from onnx import NodeProto

from passes.graph.op_facts import CURVES, OF_TWO, ONNX_DOMAINS, RESHAPES, attribute_of, input_of
from passes.graph.traversal import group_linked, topological_order
from passes.rewrites.canonical_parts import is_feature_vector
from passes.rewrites.rewriter import Rewriter, is_float
from passes.suggest import plural

Lead = tuple[int, ...]
"""The sizes of the axes before the last one."""

MAPS: Final = CURVES | OF_TWO | {"Where", "Clip"}
"""Operators that compute element by element."""

ALONG_ROWS: Final = frozenset({"Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization", "Split", "Concat"})
"""Operators that treat each row by itself where their axis is the last one."""

FIRST_AXIS: Final = frozenset({"Split", "Concat"})
"""Operators whose axis is the first one where nothing is said."""


@dataclass(frozen=True)
class _RowRegion:
    """Operators on values of one `lead`, each with the inputs that are such values or broadcast to them."""

    lead: Lead
    nodes: tuple[NodeProto, ...]

    @cached_property
    def values(self) -> frozenset[str]:
        return frozenset(name for node in self.nodes for name in node.output if name)

    @cached_property
    def reads(self) -> frozenset[str]:
        return frozenset(name for node in self.nodes for name in node.input if name)

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(map(id, self.nodes))

    def __contains__(self, node: NodeProto) -> bool:
        return id(node) in self._ids

    def without(self, node: NodeProto) -> _RowRegion:
        return _RowRegion(self.lead, tuple(kept for kept in self.nodes if kept is not node))


def flatten_rows(rewriter: Rewriter) -> bool:
    """Let each region compute with matrices that gains by it; whether any does."""
    before = rewriter.changes
    for region in _find_regions(rewriter):
        flattener, gain = _trim(_Flattener(rewriter, region))
        if gain > 0 or (gain == 0 and flattener.has_biased_product()):
            flattener.write()
    return rewriter.changes > before


def _trim(flattener: _Flattener) -> tuple[_Flattener, int]:
    """The region without the operators at its ends that add more Reshapes than they save, and its gain.

    A sum of three embeddings would be entered by three Reshapes, and its result is entered by one.
    """
    gain = flattener.gain(flattener.region.values | flattener.region.reads)
    while True:
        for node in flattener.costly_ends():
            smaller = _Flattener(flattener.rewriter, flattener.region.without(node))
            touched = frozenset(filter(None, (*node.input, *node.output)))  # no other value has another gain
            more = smaller.gain(touched) - flattener.gain(touched)
            if more > 0:
                flattener, gain = smaller, gain + more
                break
        else:
            return flattener, gain


def _find_regions(rewriter: Rewriter) -> list[_RowRegion]:
    """The connected parts of operators that treat rows alike."""
    members: list[tuple[NodeProto, Lead]] = []
    places: dict[str, int] = {}
    for node in rewriter.by_op(*MAPS, *ALONG_ROWS, "MatMul", "ReduceMean"):
        lead = _lead_of(rewriter, node.output[0])
        if lead is not None and _treats_rows_alike(rewriter, node, lead):
            places.update(dict.fromkeys(node.output, len(members)))
            members.append((node, lead))
    links = [[at] for at in range(len(members))]
    for at, (node, lead) in enumerate(members):
        links += [[at, places[name]] for name in node.input if name in places and members[places[name]][1] == lead]
    return [_RowRegion(members[group[0]][1], tuple(members[at][0] for at in group)) for group in group_linked(links)]


def _lead_of(rewriter: Rewriter, name: str) -> Lead | None:
    """The lead of a value with more axes than a matrix and fixed sizes; None for other values."""
    shape = rewriter.fixed_shape(name)
    return shape[:-1] if shape is not None and len(shape) > 2 and math.prod(shape) else None


def _treats_rows_alike(rewriter: Rewriter, node: NodeProto, lead: Lead) -> bool:
    rank = len(lead) + 1
    first = _lead_of(rewriter, node.input[0]) if node.input else None
    if node.op_type == "MatMul":
        weight = rewriter.constant(node.input[1])
        return first == lead and weight is not None and weight.ndim == 2
    if node.op_type == "ReduceMean":
        axes = rewriter.ints(input_of(node, 1)) if input_of(node, 1) else None
        return first == lead and bool(attribute_of(node, "keepdims", 1)) and axes in ([-1], [rank - 1])
    if node.op_type in ALONG_ROWS:
        default = 0 if node.op_type in FIRST_AXIS else -1
        if node.op_type in ("Softmax", "LogSoftmax") and rewriter.opset < 13:
            default = 1
        axis = attribute_of(node, "axis", default)
        if axis not in (-1, rank - 1) or (any(node.output[1:]) and node.op_type != "Split"):
            return False
        if node.op_type == "Concat":
            return all(_lead_of(rewriter, name) == lead for name in node.input)
        return first == lead and all(len(rewriter.fixed_shape(name) or (0, 0)) == 1 for name in node.input[1:] if name)
    names = [name for name in node.input if name]
    return all(_broadcasts(rewriter, name, lead) for name in names) and any(
        _lead_of(rewriter, name) == lead for name in names
    )


def _broadcasts(rewriter: Rewriter, name: str, lead: Lead) -> bool:
    """Whether a matrix can stand for an operand: it has all rows, or the same row for all."""
    shape = rewriter.fixed_shape(name)
    if shape is None:
        return False
    before = shape[:-1]
    is_whole = math.prod(before) == math.prod(lead) and before == lead[len(lead) - len(before) :]
    return is_whole or all(size == 1 for size in before)


@dataclass(slots=True)
class _Flattener:
    """Decides on one region, and writes it."""

    rewriter: Rewriter
    region: _RowRegion

    def gain(self, names: Collection[str]) -> int:
        """How many nodes fewer there are at values that the region reads or makes, once it computes with matrices."""
        values = self.region.values
        exits = sum(self._exit_gain(name) + self._takes_bias(name) for name in names if name in values)
        return exits + sum(self._entry_gain(name) for name in names if name not in values and self._is_entry(name))

    def has_biased_product(self) -> bool:
        return any(map(self._takes_bias, self.region.values))

    def _takes_bias(self, name: str) -> bool:
        """Whether `name` is a product to which an operator of the region adds its bias."""
        found = find_bias(self.rewriter, self.rewriter.producers[name])
        return found is not None and found[0] in self.region

    def _entry_gain(self, name: str) -> int:
        """1 where a Reshape goes that makes `name` of a matrix, -1 where one is added that makes the matrix."""
        if self._matrix_of(name):
            return int(self._only_region_reads(name))
        if self._reshape_source(name) and self._only_region_reads(name):
            return 0
        return -1 if self._find_flat_copy(name) is None else 0

    def _exit_gain(self, name: str) -> int:
        """How many Reshapes go that make a matrix of `name`, less the Reshape that others need."""
        flat, _, others = self._readers(name)
        return len(flat) - others

    def costly_ends(self) -> list[NodeProto]:
        """The first and the last operators of the region that add a Reshape."""
        costly = {name for name in self._entries() if self._entry_gain(name) < 0}
        costly |= {name for name in self.region.values if self._exit_gain(name) < 0}
        values, reads = self.region.values, self.region.reads
        return [
            node
            for node in self.region.nodes
            if not costly.isdisjoint((*node.input, *node.output))
            and (values.isdisjoint(node.input) or reads.isdisjoint(node.output))
        ]

    def _entries(self) -> list[str]:
        """The computed values that the region reads and that have more axes than a matrix."""
        names = dict.fromkeys(name for node in self.region.nodes for name in node.input if name)
        return [name for name in names if name not in self.region.values and self._is_entry(name)]

    def _is_entry(self, name: str) -> bool:
        rewriter = self.rewriter
        is_computed = name in self.region.reads and rewriter.constant(name) is None
        return is_computed and len(rewriter.fixed_shape(name) or ()) > 2

    def _matrix_of(self, name: str) -> str:
        """The matrix that a Reshape turns into `name`; empty where there is none."""
        node = self.rewriter.producer(name, *RESHAPES)
        if node is None:
            return ""
        shape = self.rewriter.fixed_shape(node.input[0])
        return node.input[0] if shape == self._matrix_shape(name) else ""

    def _reshape_source(self, name: str) -> str:
        """The value that a Reshape turns into `name`; empty where there is none."""
        node = self.rewriter.producer(name, *RESHAPES)
        return "" if node is None else node.input[0]

    def _matrix_shape(self, name: str) -> tuple[int, int]:
        shape = self.rewriter.fixed_shape(name)
        assert shape
        return math.prod(shape[:-1]), shape[-1]

    def _find_flat_copy(self, name: str) -> str | None:
        """The matrix that a Reshape makes of `name` already; None where there is none."""
        for node in self.rewriter.consumers[name]:
            is_reshape = node.op_type in RESHAPES and not node.domain and node.input[0] == name
            if is_reshape and self.rewriter.fixed_shape(node.output[0]) == self._matrix_shape(name):
                return node.output[0]
        return None

    def _only_region_reads(self, name: str) -> bool:
        return name not in self.rewriter.held and all(node in self.region for node in self.rewriter.consumers[name])

    def _readers(self, name: str) -> tuple[list[NodeProto], list[NodeProto], bool]:
        """The Reshapes outside that make a matrix of `name`; those that make something else; and whether others read
        `name` as it is."""
        outside = [node for node in self.rewriter.consumers[name] if node not in self.region]
        flat = [node for node in outside if self._makes_matrix(node, name)]
        shapes = [node for node in outside if node not in flat and self._is_fixed_reshape(node, name)]
        return flat, shapes, len(flat) + len(shapes) < len(outside) or name in self.rewriter.held

    def _is_fixed_reshape(self, node: NodeProto, name: str) -> bool:
        is_reshape = node.op_type in RESHAPES and not node.domain and node.input[0] == name
        return is_reshape and self.rewriter.fixed_shape(node.output[0]) is not None

    def _makes_matrix(self, node: NodeProto, name: str) -> bool:
        is_free = node.output[0] not in self.rewriter.held and self._is_fixed_reshape(node, name)
        return is_free and self.rewriter.fixed_shape(node.output[0]) == self._matrix_shape(name)

    def write(self) -> None:
        """Write each operator of the region on matrices, in order."""
        known = {name: self._enter(name) for name in self._entries()}
        nodes = [self.region.nodes[place] for place in topological_order(self.region.nodes)]
        reads = [list(node.input) for node in nodes]  # now: to replace a value changes the nodes that read it
        moved: dict[str, str] = {}
        """What a Reshape of a value of the region made → what stands for it now; the region may read it as well."""
        for node, names_read in zip(nodes, reads, strict=True):
            inputs = [known.get(name) or self._operand(name) for name in names_read]
            inputs = [moved.get(name, name) for name in inputs]
            if node.op_type == "ReduceMean":
                inputs[1] = self.rewriter.constant_ints([-1], "last_axis")
            names = list(filter(None, node.output))
            read = {name: self._readers(name) for name in names}
            known.update(zip(names, self._copy(node, inputs), strict=True))
            for name, (flat, shapes, others) in read.items():
                for reader in flat:
                    moved[reader.output[0]] = known[name]
                    self.rewriter.replace(reader.output[0], known[name])
                for reader in shapes:
                    moved[reader.output[0]] = self._write_reshape(reader, known[name])
                if others:
                    self._write_reshape(node, known[name], name)
        for name in [name for node in reversed(nodes) for name in node.output]:
            self.rewriter.drop_unread(name)

    def _copy(self, node: NodeProto, inputs: Sequence[str]) -> list[str]:
        """Add the operator of `node` on matrices, and return the names of its outputs."""
        axis = {} if attribute_of(node, "axis") is None else {"axis": -1}
        return self.rewriter.add_copies(node, inputs, list(map(self._matrix_shape, node.output)), **axis)

    def _enter(self, name: str) -> str:
        """The matrix for a value that the region reads."""
        source = self._reshape_source(name) if self._only_region_reads(name) else ""
        known = self._matrix_of(name) or self._find_flat_copy(name)
        return known or self.rewriter.reshape(source or name, self._matrix_shape(name), self.region.nodes[0])

    def _operand(self, name: str) -> str:
        """A constant of an operator, as a matrix where it has more axes."""
        array = self.rewriter.constant(name) if name else None
        if array is None or array.ndim < 3:
            return name
        return self.rewriter.constant_of(array.reshape(math.prod(array.shape[:-1]), array.shape[-1]), f"{name}/rows")

    def _write_reshape(self, node: NodeProto, matrix: str, name: str = "") -> str:
        """Make the output of a node, or its output `name`, from a matrix; returns what it is called now."""
        name = name or node.output[0]
        shape = self.rewriter.fixed_shape(name)
        assert shape is not None
        made = self.rewriter.reshape(matrix, shape, self.region.nodes[0])
        self.rewriter.replace(name, made)
        return name if name in self.rewriter.held else made


def find_bias(rewriter: Rewriter, product: NodeProto) -> tuple[NodeProto, str] | None:
    """The Add that alone reads a product with a stored matrix, and the stored vector that it adds to each row.

    Args:
        rewriter: the graph.
        product: any node.

    Returns:
        The Add and the name of the vector; None for a node that is no such product, or has no bias.
    """
    name = product.output[0]
    if product.op_type != "MatMul" or product.domain not in ONNX_DOMAINS or rewriter.is_shared(name):
        return None
    sums = [node for node in rewriter.consumers[name] if node.op_type == "Add" and node.domain in ONNX_DOMAINS]
    rank, weight = len(rewriter.shape(name) or ()), rewriter.constant(product.input[1])
    if not rank or not sums or weight is None or weight.ndim != 2:
        return None
    (bias,) = [read for read in sums[0].input if read != name]
    vector = rewriter.constant(bias)
    is_bias = vector is not None and is_float(vector) and is_feature_vector(vector, rank, weight.shape[1])
    return (sums[0], bias) if is_bias else None


def join_biases(rewriter: Rewriter) -> bool:
    """Write each product of matrices and its bias as one Gemm; whether any is."""
    before = rewriter.changes
    for product in rewriter.by_op("MatMul"):
        found = find_bias(rewriter, product)
        if found is not None and len(rewriter.shape(product.input[0]) or ()) == 2:
            end, bias = found
            gemm = rewriter.add("Gemm", [*product.input, bias], end, rewriter.shape(end.output[0]))
            rewriter.replace(end.output[0], gemm)
    return rewriter.changes > before


def why_apart(rewriter: Rewriter) -> str:
    """How many products of rows stay apart from their bias, and why; empty where none does."""
    names = [node.output[0] for node in rewriter.by_op("MatMul") if find_bias(rewriter, node)]
    fixed = [name for name in names if rewriter.fixed_shape(name)]
    costly = f"{plural(len(fixed), 'product')} apart from the bias: a Gemm would need more Reshapes than it saves nodes"
    unknown = f"{plural(len(names) - len(fixed), 'product')} apart from the bias: sizes are open"
    return "; ".join([costly] * bool(fixed) + [unknown] * (len(fixed) < len(names)))
