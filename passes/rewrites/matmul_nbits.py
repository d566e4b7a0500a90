"""Weights of 4 bits in two layouts: DequantizeLinear before a product, and onnxruntime's `MatMulNBits`; both ways.

`MatMulNBits` stores unsigned integers, [N, blocks, bytes of a block], low nibble first, with a zero point of 8 where
none is stored; DequantizeLinear has [K, N] with scales [blocks, N]. The integers are the same, so nothing is rounded.
Source: onnxruntime's ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import ml_dtypes
import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from passes.context import PassContext
from passes.graph.index import GraphIndex, computed_values, copy_of, free_name, replace_entries, value_names
from passes.graph.op_facts import MATRIX_PRODUCTS, attribute_of, opset_of
from passes.graph.traversal import read_names
from passes.step import Description, PassResult, Step, structure
from passes.suggest import plural
from passes.weights.detached import DetachedModel

CONTRIB: Final = "com.microsoft"
OPERATOR: Final = "MatMulNBits"
MIDDLE: Final = 8
"""The zero point of unsigned integers of 4 bits that stands for zero of signed ones."""

FOUR_BITS: Final[Mapping[int, int]] = {TensorProto.INT4: MIDDLE, TensorProto.UINT4: 0}
"""Dtype → what is added to its integers to have unsigned ones."""

LEAST_BLOCK: Final = 16
OPSET: Final = 21
"""The first opset whose DequantizeLinear has 4 bits and blocks."""


@dataclass(frozen=True, slots=True)
class NibbleWeight:
    """A weight of 4 bits: unsigned integers [K, N], zero points and scales [blocks, N]."""

    integers: np.ndarray
    zero_points: np.ndarray
    scales: np.ndarray
    block: int

    def pack(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Integers [N, blocks, block / 2], scales [N, blocks], zero points [N, (blocks + 1) / 2] of `MatMulNBits`."""
        rows, columns = self.integers.shape
        blocks = len(self.scales)
        padded = np.zeros((blocks * self.block, columns), np.uint8)
        padded[:rows] = self.integers
        integers = pack_nibbles(padded.T).reshape(columns, blocks, self.block // 2)
        return integers, np.ascontiguousarray(self.scales.T), pack_nibbles(self.zero_points.T)

    @classmethod
    def unpack(
        cls, rows: int, block: int, data: np.ndarray, scales: np.ndarray, zero: np.ndarray | None
    ) -> NibbleWeight:
        """What `packed` has made, for `rows` inputs of the product."""
        columns, blocks = data.shape[0], data.shape[1]
        integers = unpack_nibbles(data.reshape(columns, -1))[:, :rows].T
        zeros = np.full((columns, blocks), MIDDLE, np.uint8)
        if zero is not None:
            zeros = unpack_nibbles(zero.reshape(columns, -1))[:, :blocks]
        return cls(integers, zeros.T, scales.reshape(columns, blocks).T, block)


def pack_nibbles(rows: np.ndarray) -> np.ndarray:
    """Two integers in a byte along the last axis, the first one low; an odd row gets a zero at its end."""
    even = np.pad(rows.astype(np.uint8), ((0, 0), (0, rows.shape[1] % 2)))
    return even[:, ::2] | (even[:, 1::2] << 4)


def unpack_nibbles(rows: np.ndarray) -> np.ndarray:
    """The integers of `pack_nibbles`."""
    return np.stack((rows & 15, rows >> 4), axis=-1).reshape(len(rows), -1)


@dataclass(frozen=True, slots=True)
class ToMatMulNBits(Step):
    """Write `MatMulNBits` for MatMul and Gemm whose weight is stored in 4 bits, in blocks or by channel.

    block_size: of weights by channel, whose scales are repeated for each block.
    """

    block_size: int = 32
    name: str = field(default="to-matmul-nbits", init=False)
    description: ClassVar[Description] = structure("Write products with weights of 4 bits as MatMulNBits")

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        layout = _LayoutChange(model)
        for node in layout.nodes:
            weight, why = read_dequantized(node, layout.index, model, self.block_size)
            if weight is not None:
                self._write(node, weight, layout)
            elif why:
                layout.left.append(f"{node.name or node.output[0]}: {why}")
        return layout.result("products as MatMulNBits")

    def _write(self, node: NodeProto, weight: NibbleWeight, layout: _LayoutChange) -> None:
        rows, columns = weight.integers.shape
        names = layout.known.get(node.input[1], [])
        if not names:
            stem = layout.open_stem(node.input[1])
            integers, scales, zeros = weight.pack()
            names += [layout.store(integers, f"{stem}_quantized"), layout.store(scales, f"{stem}_scale")]
            if (weight.zero_points != MIDDLE).any():
                names.append(layout.store(zeros, f"{stem}_zero_point"))
            layout.known[node.input[1]] = names
        sizes = {"K": rows, "N": columns, "bits": 4, "block_size": weight.block}
        layout.replace(node, OPERATOR, [node.input[0], *names], CONTRIB, **sizes)


@dataclass(frozen=True, slots=True)
class FromMatMulNBits(Step):
    """Write DequantizeLinear and MatMul for onnxruntime's `MatMulNBits` with stored integers of 4 bits."""

    name: str = field(default="from-matmul-nbits", init=False)
    description: ClassVar[Description] = structure("Write MatMulNBits as DequantizeLinear and MatMul")

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        layout = _LayoutChange(model)
        for node in layout.nodes:
            if (node.domain, node.op_type) != (CONTRIB, OPERATOR):
                continue
            weight, why = _read_packed(node, layout.index, model)
            if weight is None:
                layout.left.append(f"{node.name or node.output[0]}: {why}")
                continue
            self._write(node, weight, layout)
        return layout.result("MatMulNBits as DequantizeLinear and MatMul")

    def _write(self, node: NodeProto, weight: NibbleWeight, layout: _LayoutChange) -> None:
        if node.input[1] not in layout.known:
            stem = layout.open_stem(node.input[1])
            is_signed = bool((weight.zero_points == MIDDLE).all())
            dtype = ml_dtypes.int4 if is_signed else ml_dtypes.uint4
            integers = (weight.integers.astype(np.int8) - (MIDDLE if is_signed else 0)).astype(dtype)
            names = [layout.store(integers, f"{stem}_quantized"), layout.store(weight.scales, f"{stem}_scale")]
            if not is_signed:
                names.append(layout.store(weight.zero_points.astype(dtype), f"{stem}_zero_point"))
            result = layout.free(f"{stem}_dequantized")
            layout.add("DequantizeLinear", names, result, node, axis=0, block_size=weight.block)
            layout.known[node.input[1]] = [result]
        layout.replace(node, "MatMul", [node.input[0], *layout.known[node.input[1]]], "")


def read_dequantized(
    node: NodeProto, index: GraphIndex, model: DetachedModel, channel_block: int
) -> tuple[NibbleWeight | None, str]:
    """The weight of a product by its DequantizeLinear, or why it has none; "" where it is another product.

    Args:
        node: the product.
        index: the index of its graph.
        model: the model with the weights.
        channel_block: the block of a weight by channel; 0 for one block of all inputs.
    """
    if node.domain or node.op_type not in MATRIX_PRODUCTS or len(node.input) < 2:
        return None, ""
    producer, is_transposed = index.producers.get(node.input[1]), False
    if (
        producer is not None
        and producer.op_type == "Transpose"
        and list(attribute_of(producer, "perm", [1, 0])) == [1, 0]
    ):
        producer, is_transposed = index.producers.get(producer.input[0]), True
    stored = index.initializers
    if producer is None or producer.op_type != "DequantizeLinear" or producer.input[0] not in stored:
        return None, ""
    tensors = [stored.get(name) for name in producer.input if name]
    if tensors[0] is None or tensors[0].data_type not in FOUR_BITS:
        return None, ""
    if any(tensor is None for tensor in tensors) or len(tensors[0].dims) != 2:
        return None, "its weight is no stored matrix with stored scales"
    if node.op_type == "Gemm":
        if (
            attribute_of(node, "transA", 0)
            or attribute_of(node, "alpha", 1.0) != 1
            or attribute_of(node, "beta", 1.0) != 1
        ):
            return None, "its factors are transposed or scaled"
        is_transposed ^= bool(attribute_of(node, "transB", 0))
    integers, scales, *zero = (model.array(tensor) for tensor in tensors if tensor is not None)
    shift = FOUR_BITS[tensors[0].data_type]
    zeros = (zero[0] if zero else np.zeros(scales.shape, np.int8)).astype(np.int8) + shift
    unsigned = (integers.astype(np.int8) + shift).astype(np.uint8)
    axis, block = attribute_of(producer, "axis", 1) % 2, attribute_of(producer, "block_size", 0)
    if is_transposed:
        unsigned, axis = unsigned.T, 1 - axis
        scales, zeros = (array.T if array.ndim == 2 else array for array in (scales, zeros))
    if block == 0 and (axis == 1 or scales.ndim == 0):
        channel_block = channel_block or len(unsigned)
        blocks = -(-len(unsigned) // channel_block)
        scales, zeros = (np.broadcast_to(array, (blocks, unsigned.shape[1])) for array in (scales, zeros))
        return NibbleWeight(unsigned, zeros.astype(np.uint8), scales, channel_block), ""
    if block == 0 or axis != 0:
        return None, "its scales go along the other axis than MatMulNBits has blocks"
    if block < LEAST_BLOCK or block & (block - 1):
        return None, f"it has blocks of {block}, and MatMulNBits takes powers of 2 starting at {LEAST_BLOCK}"
    return NibbleWeight(unsigned, zeros.astype(np.uint8), scales, block), ""


def _read_packed(node: NodeProto, index: GraphIndex, model: DetachedModel) -> tuple[NibbleWeight | None, str]:
    """The weight of a MatMulNBits, or why it stays."""
    sizes: Mapping[str, int] = {name: attribute_of(node, name, 0) for name in ("K", "N", "bits", "block_size")}
    if sizes["bits"] not in (0, 4):  # 4 by default
        return None, f"it has {sizes['bits']} bits"
    if opset_of(model.proto) < OPSET:
        return None, f"DequantizeLinear has blocks of 4 bits starting at opset {OPSET}; put convert-opset before"
    if len(node.input) > 4 and node.input[4]:
        return None, "its g_idx orders the inputs"
    names = [*node.input[1:4], *([""] * (4 - len(node.input)))]
    stored = [index.initializers.get(name) if name else None for name in names]
    if stored[0] is None or stored[1] is None or (names[2] and stored[2] is None):
        return None, "its integers, scales or zero points are computed"
    data, scales, *zero = (model.array(tensor) for tensor in stored if tensor is not None)
    if zero and zero[0].dtype != np.uint8:
        return None, "its zero points are floats"
    blocks = -(-sizes["K"] // sizes["block_size"])
    data = data.reshape(sizes["N"], blocks, sizes["block_size"] // 2)
    return NibbleWeight.unpack(sizes["K"], sizes["block_size"], data, scales, zero[0] if zero else None), ""


class _LayoutChange:
    """Collects new nodes and tensors for a copy of a model."""

    def __init__(self, model: DetachedModel) -> None:
        self._model, self._proto = model, model.copy_proto()
        self.index = GraphIndex(self._proto.graph)
        self.nodes = list(self._proto.graph.node)
        self.left: list[str] = []
        self.known: dict[str, list[str]] = {}
        """Weight, by what the product reads → the names of the new tensors."""
        self._taken = value_names(self._proto.graph)
        self._before: dict[int, list[NodeProto]] = {}
        self._new: dict[int, list[NodeProto]] = {}
        self._tensors: list[TensorProto] = []

    def open_stem(self, name: str) -> str:
        """What the names of the new tensors of the weight `name` begin with, as `quantsim` names them. The names of its
        old tensors are free where nothing else reads these."""
        old = [name]
        for value in old:
            producer = self.index.producers.get(value)
            old += producer.input if producer is not None else ()
            node = producer or next(iter(self.index.consumers.get(value, ())), None)
            if node is not None and node.op_type == OPERATOR:
                old += [read for read in node.input[2:4] if read not in old]
        self._taken = self._taken - {value for value in old if len(self.index.consumers.get(value, ())) == 1}
        for ending in ("_quantized", "_dequantized", "_DequantizeLinear_Output"):
            name = name.removesuffix(ending)
        return name

    def free(self, name: str) -> str:
        found = free_name(name, self._taken)
        self._taken = self._taken | {found}
        return found

    def store(self, array: np.ndarray, name: str) -> str:
        self._tensors.append(numpy_helper.from_array(np.ascontiguousarray(array), self.free(name)))
        return self._tensors[-1].name

    def add(self, op: str, inputs: list[str], output: str, template: NodeProto, **attributes: Any) -> None:
        node = helper.make_node(op, inputs, [output], f"{template.name}/{op}" if template.name else "", **attributes)
        node.metadata_props.extend(template.metadata_props)
        self._before.setdefault(id(template), []).append(node)

    def replace(self, node: NodeProto, op: str, inputs: list[str], domain: str, **attributes: Any) -> None:
        """Put `op` in place of `node`, under its name; a bias becomes an Add after it."""
        place = 2 if node.op_type == "Gemm" else 5
        bias = node.input[place] if len(node.input) > place else ""
        output = self.free(f"{node.output[0]}_product") if bias else node.output[0]
        made = helper.make_node(op, inputs, [output], node.name, domain=domain, **attributes)
        made.metadata_props.extend(node.metadata_props)
        added = helper.make_node("Add", [output, bias], list(node.output), f"{node.name}/bias" if node.name else "")
        added.metadata_props.extend(node.metadata_props)
        self._new[id(node)] = [made, added] if bias else [made]

    def result(self, what: str) -> PassResult:
        left = f"{plural(len(self.left), 'product')} left as they are, the first is {self.left[0]}" if self.left else ""
        if not self._new:
            return PassResult(self._model, changed=False, why=left or f"0 {what}")
        graph = self._proto.graph
        nodes = [
            new
            for node in self.nodes
            for new in (*self._before.get(id(node), ()), *self._new.get(id(node), (copy_of(node),)))
        ]
        replace_entries(graph.node, _without_unread(nodes, {info.name for info in graph.output}))
        new = {tensor.name for tensor in self._tensors}
        kept = [tensor for tensor in graph.initializer if tensor.name not in new]
        replace_entries(graph.initializer, [*kept, *self._tensors])
        reads = read_names(graph.node) | {info.name for info in graph.output}
        replace_entries(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in reads])
        made = computed_values(graph.node)
        replace_entries(graph.value_info, [info for info in graph.value_info if info.name in made])
        domains = {node.domain for node in graph.node}
        if CONTRIB in domains and all(entry.domain != CONTRIB for entry in self._proto.opset_import):
            self._proto.opset_import.append(onnx.helper.make_opsetid(CONTRIB, 1))
        return PassResult(self._model.with_proto(self._proto), why=f"{len(self._new)} {what}{left and f'; {left}'}")


def _without_unread(nodes: list[NodeProto], outputs: set[str]) -> list[NodeProto]:
    """Without the DequantizeLinear and Transpose that only a replaced product has read."""
    while True:
        reads = read_names(nodes) | outputs
        kept = [
            node
            for node in nodes
            if node.op_type not in ("DequantizeLinear", "Transpose") or not reads.isdisjoint(node.output)
        ]
        if len(kept) == len(nodes):
            return kept
        nodes = kept
