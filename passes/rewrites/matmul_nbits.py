"""Weights of 4 bits in two layouts: DequantizeLinear before a product, and onnxruntime's `MatMulNBits`; both ways.

`MatMulNBits` stores unsigned integers, [N, blocks, bytes of a block], low nibble first, with a zero point of 8 where
none is stored; DequantizeLinear has [K, N] with scales [blocks, N]. The integers are the same, so nothing is rounded.
Source: onnxruntime's ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
from onnx import NodeProto, TensorProto

from passes.graph.index import GraphIndex
from passes.graph.op_facts import CONTRIB, MATRIX_PRODUCTS, attribute_of, input_of, is_scaled, opset_of
from passes.rewrites.rewriter import Rewriter, RewriteStep
from passes.step import PassResult
from passes.suggest import plural
from passes.weights.detached import DetachedModel

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
class ToMatMulNBits(RewriteStep, name="to-matmul-nbits", reads="structure"):
    """Write products with weights of 4 bits as MatMulNBits. The products are MatMul and Gemm, the weights stored in
    blocks or by channel.

    block_size: of weights by channel, whose scales are repeated for each block.
    """

    block_size: int = 32

    def rewrite(self, rewriter: Rewriter) -> PassResult:
        model, known, left, written = rewriter.model, dict[str, list[str]](), list[str](), 0
        for node in rewriter.nodes:
            weight, why = read_dequantized(node, model.index, model, self.block_size)
            if weight is None:
                left += [f"{node.name or node.output[0]}: {why}"] if why else []
                continue
            names = known.setdefault(node.input[1], [])
            if not names:
                stem = _open_stem(rewriter, node.input[1])
                integers, scales, zeros = weight.pack()
                names += [rewriter.store(integers, f"{stem}_quantized"), rewriter.store(scales, f"{stem}_scale")]
                names += [rewriter.store(zeros, f"{stem}_zero_point")] if (weight.zero_points != MIDDLE).any() else []
            rows, columns = weight.integers.shape
            sizes = {"K": rows, "N": columns, "bits": 4, "block_size": weight.block}
            _write_product(rewriter, node, OPERATOR, [node.input[0], *names], CONTRIB, **sizes)
            written += 1
        return _result(rewriter, written, "products as MatMulNBits", left)


@dataclass(frozen=True, slots=True)
class FromMatMulNBits(RewriteStep, name="from-matmul-nbits", reads="structure"):
    """Write MatMulNBits as DequantizeLinear and MatMul. Only onnxruntime's `MatMulNBits` with stored integers of 4
    bits is written so."""

    def rewrite(self, rewriter: Rewriter) -> PassResult:
        model, known, left, written = rewriter.model, dict[str, str](), list[str](), 0
        for node in rewriter.nodes:
            if (node.domain, node.op_type) != (CONTRIB, OPERATOR):
                continue
            weight, why = _read_packed(node, model.index, model)
            if weight is None:
                left.append(f"{node.name or node.output[0]}: {why}")
                continue
            if node.input[1] not in known:
                known[node.input[1]] = _write_dequantized(rewriter, node, weight)
            _write_product(rewriter, node, "MatMul", [node.input[0], known[node.input[1]]])
            written += 1
        return _result(rewriter, written, "MatMulNBits as DequantizeLinear and MatMul", left)


def _write_dequantized(rewriter: Rewriter, node: NodeProto, weight: NibbleWeight) -> str:
    """Add the DequantizeLinear of a weight, and return the name of its result."""
    stem = _open_stem(rewriter, node.input[1])
    is_signed = bool((weight.zero_points == MIDDLE).all())
    dtype = ml_dtypes.int4 if is_signed else ml_dtypes.uint4
    integers = (weight.integers.astype(np.int8) - (MIDDLE if is_signed else 0)).astype(dtype)
    names = [rewriter.store(integers, f"{stem}_quantized"), rewriter.store(weight.scales, f"{stem}_scale")]
    names += [] if is_signed else [rewriter.store(weight.zero_points.astype(dtype), f"{stem}_zero_point")]
    result = rewriter.free(f"{stem}_dequantized")
    return rewriter.add("DequantizeLinear", names, node, output=result, axis=0, block_size=weight.block)


def _open_stem(rewriter: Rewriter, name: str) -> str:
    """What the names of the new tensors of the weight `name` begin with, as `quantsim` names them. The names of its old
    tensors are free where nothing else reads these."""
    old = [name]
    for value in (value for value in old if len(rewriter.consumers[value]) == 1):  # of names that are added meanwhile
        producer = rewriter.producer(value)
        old += producer.input if producer is not None else ()
        node = producer or next(iter(rewriter.consumers[value]), None)
        if node is not None and node.op_type == OPERATOR:
            old += [read for read in node.input[2:4] if read not in old]
    rewriter.release_names(value for value in old if len(rewriter.consumers[value]) == 1)
    for ending in ("_quantized", "_dequantized", "_DequantizeLinear_Output"):
        name = name.removesuffix(ending)
    return name


def _write_product(
    rewriter: Rewriter, node: NodeProto, op: str, inputs: list[str], domain: str = "", **attributes: Any
) -> None:
    """Make another product of `node`, under its name; a bias becomes an Add after it."""
    bias, result = input_of(node, 2 if node.op_type == "Gemm" else 5), node.output[0]
    if bias:  # first: the bias may be computed, and goes where nothing reads it
        product = rewriter.take_output(result, f"{result}_product")
        rewriter.add("Add", [product, bias], node, rewriter.shape(product), output=result)
    rewriter.turn_into(node, op, inputs, domain, **attributes)


def _result(rewriter: Rewriter, written: int, what: str, left: list[str]) -> PassResult:
    stays = f"{plural(len(left), 'product')} left as they are, the first is {left[0]}" if left else ""
    return rewriter.result(f"{written} {what}" if written else "", stays, default=f"0 {what}")


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
    producer = index.producers.get(node.input[1])
    perm = attribute_of(producer, "perm", [1, 0]) if producer is not None and producer.op_type == "Transpose" else ()
    is_transposed = producer is not None and list(perm) == [1, 0]
    producer = index.producers.get(producer.input[0]) if producer is not None and is_transposed else producer
    stored = index.initializers
    if producer is None or producer.op_type != "DequantizeLinear" or producer.input[0] not in stored:
        return None, ""
    tensors = [stored.get(name) for name in producer.input if name]
    if tensors[0] is None or tensors[0].data_type not in FOUR_BITS:
        return None, ""
    if any(tensor is None for tensor in tensors) or len(tensors[0].dims) != 2:
        return None, "its weight is no stored matrix with stored scales"
    if node.op_type == "Gemm":
        if is_scaled(node):
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
