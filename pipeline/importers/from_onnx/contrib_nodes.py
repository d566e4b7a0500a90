"""Operators of onnxruntime's own domain, spelled by operators of the standard: what optimizers and exporters emit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from passes.rewrites.attention_core import write_core
from passes.rewrites.attention_operators import READERS, read_attention
from passes.rewrites.node_writer import GraphTypes, NodeWriter, NotHandledError
from passes.weights.detached import DetachedModel
from pipeline.errors import Unsupported
from pipeline.importers.from_onnx.attributes import Attributes
from pipeline.importers.from_onnx.inline import Fresh, PendingNode
from pipeline.importers.from_onnx.specs import element_type
from pipeline.ir.graph import TensorSpec

OPSET = 23
"""The first opset with all operators that are written here."""


@dataclass(slots=True)
class Writing:
    """A node of onnxruntime's domain, what is known of its inputs, and the nodes that are written for it."""

    proto: onnx.NodeProto
    specs: Mapping[str, TensorSpec]
    constants: Callable[[str], np.ndarray | None]
    fresh: Fresh
    nodes: list[onnx.NodeProto]

    @property
    def attributes(self) -> Attributes:
        return Attributes(self.proto)

    def input_name(self, place: int) -> str:
        return self.proto.input[place] if place < len(self.proto.input) else ""

    def add(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Write a node, and return the name of its output."""
        name = output or self.fresh(f"{self.proto.output[0]}.{kind}")
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=self.proto.name, **attributes))
        return name

    def constant(self, array: np.ndarray) -> str:
        return self.add("Constant", value=numpy_helper.from_array(array))

    def number(self, value: float, like: str) -> str:
        return self.constant(np.array(value, self.specs[like].dtype))

    def give(self, value: str, place: int = 0) -> None:
        """Let `value` be output `place` of the node, where that is asked for."""
        if place < len(self.proto.output) and self.proto.output[place]:
            self.add("Identity", value, output=self.proto.output[place])


def standard_nodes(
    node: PendingNode,
    specs: Mapping[str, TensorSpec],
    constants: Callable[[str], np.ndarray | None],
    fresh: Fresh,
) -> list[PendingNode] | None:
    """The nodes of the standard that `node` is short for; None where its kind or its form is not known."""
    domain = "" if node.proto.domain == "ai.onnx" else node.proto.domain
    if any(name and name not in specs for name in node.proto.input):
        return None
    if domain == "com.microsoft" and (domain, node.proto.op_type) in READERS:
        nodes = attention_nodes(node, specs, constants, fresh)
    elif node.key in WRITERS:
        nodes = _write_standard(node, Writing(node.proto, specs, constants, fresh, []))
    else:
        return None
    if nodes is None:
        return None
    opsets = {**node.opsets, "": max(node.opsets.get("", 0), OPSET)}
    for inner in nodes:
        if not inner.metadata_props:
            inner.metadata_props.extend(node.proto.metadata_props)
    return [PendingNode(inner, opsets) for inner in nodes]


def _write_standard(node: PendingNode, writing: Writing) -> list[onnx.NodeProto]:
    """The nodes of a writer.

    Raises:
        Unsupported: inputs are missing, or tensors and attributes do not fit together.
    """
    missing = [place for place in range(NEEDED[node.key]) if not writing.input_name(place)]
    if missing:
        raise Unsupported(f"node {node.proto.name!r} ({node.proto.op_type}) has no input {missing[0]}, which it needs")
    try:
        WRITERS[node.key](writing)
    except (ValueError, TypeError, IndexError) as error:
        place = f"node {node.proto.name!r} ({node.proto.op_type})"
        raise Unsupported(f"{place} does not fit its inputs: {error}") from error
    return writing.nodes


def attention_nodes(
    node: PendingNode,
    specs: Mapping[str, TensorSpec],
    constants: Callable[[str], np.ndarray | None],
    fresh: Fresh,
) -> list[onnx.NodeProto] | None:
    """As the step decompose-attention takes it apart; None where that leaves it as it is."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node.proto)
    copy.name = fresh(copy.name or copy.output[0])
    infos = {name: (element_type(spec.dtype), spec.sizes) for name in copy.input if name and (spec := specs[name])}
    arrays = {name: array for name in copy.input if name and (array := constants(name)) is not None}
    graph = helper.make_graph(
        [copy], "one_node", [], [], [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    written: dict[str, TensorProto] = {}
    writer = NodeWriter(copy, {*copy.input, *copy.output}, written)
    try:
        write_core(read_attention(writer, GraphTypes(infos, DetachedModel(model, {}))), writer)
    except NotHandledError:
        return None
    stored = [
        helper.make_node("Constant", [], [tensor.name], value=tensor)
        for tensor in written.values()
        if tensor.name not in arrays
    ]
    return [*stored, *writer.nodes]


def fused_matmul(node: Writing) -> None:
    """Operands may be transposed, and the product scaled."""
    read = node.attributes
    if read.flag("transBatchA") or read.flag("transBatchB"):
        raise Unsupported(f"node {node.proto.name!r} (FusedMatMul) transposes its batch; rewrite it as Transposes")
    operands = []
    for name, flag in zip(node.proto.input, ("transA", "transB"), strict=True):
        rank = node.specs[name].rank
        turned = read.flag(flag) and rank > 1
        perm = [*range(rank - 2), rank - 1, rank - 2]
        operands.append(node.add("Transpose", name, perm=perm) if turned else name)
    product = node.add("MatMul", *operands)
    alpha = read.number("alpha", 1.0)
    node.give(product if alpha == 1.0 else node.add("Mul", product, node.number(alpha, node.proto.input[0])))


def gelu(approximate: str) -> Callable[[Writing], None]:
    """Gelu, of x or of x and a bias."""

    def write(node: Writing) -> None:
        x = node.add("Add", node.input_name(0), node.input_name(1)) if node.input_name(1) else node.input_name(0)
        node.give(node.add("Gelu", x, approximate=approximate))

    return write


def quick_gelu(node: Writing) -> None:
    scaled = node.add(
        "Mul", node.input_name(0), node.number(node.attributes.number("alpha", 1.702), node.input_name(0))
    )
    node.give(node.add("Mul", node.input_name(0), node.add("Sigmoid", scaled)))


def skip_layer_norm(node: Writing) -> None:
    """Inputs: x, skip, gamma, beta, bias. The last output is the sum that is normalised."""
    total = node.add("Add", node.input_name(0), node.input_name(1))
    if node.input_name(4):
        total = node.add("Add", total, node.input_name(4))
    weights = [name for name in (node.input_name(2), node.input_name(3)) if name]
    epsilon = node.attributes.number("epsilon", 1e-5)
    node.give(node.add("LayerNormalization", total, *weights, axis=-1, epsilon=epsilon))
    node.give(total, 3)


def skip_rms_norm(node: Writing) -> None:
    """Inputs: x, skip, gamma, bias. The last output is the sum that is normalised."""
    total = node.add("Add", node.input_name(0), node.input_name(1))
    if node.input_name(3):
        total = node.add("Add", total, node.input_name(3))
    epsilon = node.attributes.number("epsilon", 1e-5)
    node.give(node.add("RMSNormalization", total, node.input_name(2), axis=-1, epsilon=epsilon))
    node.give(total, 3)


def rms_norm(node: Writing) -> None:
    """SimplifiedLayerNormalization, which onnxruntime adds to ONNX's own domain."""
    read = node.attributes
    axis, epsilon = read.integer("axis", -1), read.number("epsilon", 1e-5)
    node.give(node.add("RMSNormalization", node.input_name(0), node.input_name(1), axis=axis, epsilon=epsilon))


def matmul_n_bits(node: Writing) -> None:
    """x times a matrix of 4 or 8 bits, stored by columns in blocks of `block_size` rows, each with a scale."""
    read = node.attributes
    rows, columns = read.integer("K"), read.integer("N")
    bits, block = read.integer("bits", 4), read.integer("block_size")
    packed = node.constants(node.input_name(1))
    if packed is None or bits not in (4, 8) or node.input_name(4):
        raise Unsupported(
            f"node {node.proto.name!r} (MatMulNBits) has {bits} bits, computed weights or an order of groups; "
            "expected stored weights of 4 or 8 bits, in order"
        )
    blocks = -(-rows // block)
    weight = unpack_bytes(packed.reshape(columns, -1), bits)[:, :rows]
    scales = node.add("Reshape", node.input_name(2), node.constant(np.array([columns, blocks])))
    operands = [node.constant(np.ascontiguousarray(weight)), scales]
    points = node.constants(node.input_name(3)) if node.input_name(3) else None
    if node.input_name(3) and points is None:
        raise Unsupported(f"node {node.proto.name!r} (MatMulNBits) computes its zero points, expected stored ones")
    if points is None:
        points = np.full((columns, blocks), 2 ** (bits - 1), np.uint8)
    elif points.dtype == np.uint8:
        points = unpack_bytes(points.reshape(columns, -1), bits)[:, :blocks]
    else:
        raise Unsupported(f"node {node.proto.name!r} (MatMulNBits) has zero points of {points.dtype}, expected uint8")
    operands.append(node.constant(np.ascontiguousarray(points)))
    matrix = node.add("DequantizeLinear", *operands, axis=1, block_size=block)
    product = node.add("MatMul", node.input_name(0), node.add("Transpose", matrix, perm=[1, 0]))
    node.give(node.add("Add", product, node.input_name(5)) if node.input_name(5) else product)


def unpack_bytes(packed: np.ndarray, bits: int) -> np.ndarray:
    """Each byte as one number, or as two of four bits, the low ones first."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)


WRITERS: dict[str, Callable[[Writing], None]] = {
    "SimplifiedLayerNormalization": rms_norm,
    "com.microsoft::BiasGelu": gelu("none"),
    "com.microsoft::FastGelu": gelu("tanh"),
    "com.microsoft::FusedMatMul": fused_matmul,
    "com.microsoft::Gelu": gelu("none"),
    "com.microsoft::MatMulNBits": matmul_n_bits,
    "com.microsoft::QuickGelu": quick_gelu,
    "com.microsoft::SkipLayerNormalization": skip_layer_norm,
    "com.microsoft::SkipSimplifiedLayerNormalization": skip_rms_norm,
}

NEEDED: dict[str, int] = {
    **dict.fromkeys(WRITERS, 1),
    "SimplifiedLayerNormalization": 2,
    "com.microsoft::BiasGelu": 2,
    "com.microsoft::FusedMatMul": 2,
    "com.microsoft::MatMulNBits": 3,
    "com.microsoft::SkipLayerNormalization": 3,
    "com.microsoft::SkipSimplifiedLayerNormalization": 3,
}
"""How many inputs an operator cannot do without."""
