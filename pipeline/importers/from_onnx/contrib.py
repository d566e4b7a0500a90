"""Operators of onnxruntime's own domain, which optimizers and exporters emit, as calls of torch."""

from __future__ import annotations

import numpy as np

from pipeline.importers.from_onnx.definitions import Term, aten, define
from pipeline.importers.from_onnx.node import Importer, Node
from pipeline.importers.from_onnx.reduce import layer_norm
from pipeline.importers.from_onnx.shape import permute, reshape
from pipeline.ir.graph import Attr, TensorSpec


def fused_matmul(node: Node, *, alpha: float = 1.0) -> None:
    """Operands may be transposed, and the product scaled."""
    read = node.attributes
    if read.flag("transBatchA") or read.flag("transBatchB"):
        raise node.refusal("it transposes its batch, expected Transpose nodes")
    operands = [node.operand(0), node.operand(1)]
    for place, name in enumerate(("transA", "transB")):
        rank = node.spec(place).rank
        if read.flag(name) and rank > 1:
            operands[place] = permute(node, operands[place], (*range(rank - 2), rank - 1, rank - 2))
    if alpha == 1:
        node.emit("aten.matmul.default", operands)
    else:
        product = node.step("aten.matmul.default", operands, node.output())
        node.emit("aten.mul.Tensor", [product], {"other": alpha})


def fast_gelu(x: Term, bias: Term | None = None) -> Term:
    return aten("gelu", x if bias is None else x + bias, approximate="tanh")


def skip_norm(operator: str, bias: int) -> Importer:
    """An importer for the norm of x + skip + bias; the sum is output 3, and the bias is input `bias`."""

    def importer(node: Node, *, epsilon: float = 1e-5) -> None:
        x, skip = node.operand(0), node.operand(1)
        spec, name = node.spec(0), node.output_names[3] if node.is_read(3) else node.fresh("sum")
        if node.has(bias):
            x = node.step("aten.add.Tensor", [x, skip], spec)
            skip = node.operand(bias)
        (total,) = node.make("aten.add.Tensor", [x, skip], [(name, spec)])
        weights = node.operands(*range(2, bias))
        settings: dict[str, Attr] = {"normalized_shape": spec.sizes[-1:], "eps": epsilon}
        node.make(operator, [total, *weights], [(node.output_names[0], spec)], settings)

    return importer


def matmul_n_bits(node: Node, *, bits: int = 4, block_size: int = 0) -> None:
    """x times a matrix of 4 or 8 bits, stored by columns in blocks of `block_size` rows, each with a scale."""
    dtype = node.spec(0).dtype
    rows, columns = (node.attributes.integer(name) for name in "KN")
    node.attributes.settle("accuracy_level")  # how onnxruntime may sum
    packed, blocks = node.constant(1), -(-rows // block_size)
    if packed is None or bits not in (4, 8) or node.has(4):
        raise node.refusal(
            f"it has {bits} bits, computed weights or an order of groups; expected stored weights of 4 or 8 bits, in "
            "order"
        )
    points = node.constant(3)
    if node.has(3) and (points is None or points.dtype != np.uint8):
        found = "computed ones" if points is None else points.dtype
        raise node.refusal(f"its zero points are {found}, expected stored ones of uint8")
    if points is None:
        points = np.full((columns, blocks), 2 ** (bits - 1), np.uint8)
    else:
        points = unpack_bytes(points.reshape(columns, -1), bits)[:, :blocks]
    weight = unpack_bytes(packed.reshape(columns, -1), bits)[:, :rows]
    scales = reshape(node, node.operand(2), (columns, blocks))
    operands = [node.constant_operand(np.ascontiguousarray(weight)), scales]
    operands.append(node.constant_operand(np.ascontiguousarray(points)))
    settings: dict[str, Attr] = {"to": dtype, "axis": 1, "block_size": block_size}
    matrix = node.step("onnxline.dequantize.default", operands, TensorSpec((columns, rows), dtype), settings)
    factors = [node.operand(0), permute(node, matrix, (1, 0))]
    if node.has(5):
        product = node.step("aten.matmul.default", factors, node.output())
        node.emit("aten.add.Tensor", [product, node.operand(5)])
    else:
        node.emit("aten.matmul.default", factors)


def unpack_bytes(packed: np.ndarray, bits: int) -> np.ndarray:
    """Each byte as one number, or as two of four bits, the low ones first."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)


def simplified_norm(node: Node, *, epsilon: float = 1e-5) -> None:
    """RMSNormalization under the name by which onnxruntime added it to ONNX's own domain."""
    node.attributes.settle("stash_type")  # of the sum in between, which is in float32 at least
    layer_norm(node, epsilon=epsilon)


def distances(node: Node, *, metric: str = "sqeuclidean") -> None:
    """Of each row of one matrix to each row of the other, squared by default."""
    if metric == "euclidean":
        node.emit("aten.cdist.default", node.operands())
    elif metric == "sqeuclidean":
        node.emit("aten.square.default", [node.step("aten.cdist.default", node.operands(), node.output())])
    else:
        raise node.refusal(f"its metric is {metric!r}, expected euclidean or sqeuclidean")


def triangle(node: Node, *, upper: bool = True) -> None:
    """The elements above a diagonal or below it; the others become 0."""
    diagonal = int(node.need_constant(1, "the diagonal").item()) if node.has(1) else 0
    node.emit(f"aten.{'triu' if upper else 'tril'}.default", node.operands(0), {"diagonal": diagonal})


IMPORTERS: dict[str, Importer] = {
    "SimplifiedLayerNormalization": simplified_norm,
    "com.microsoft::BiasGelu": define(lambda x, bias: aten("gelu", x + bias, approximate="none")),
    "com.microsoft::CDist": distances,
    "com.microsoft::FastGelu": define(fast_gelu),
    "com.microsoft::FusedMatMul": fused_matmul,
    "com.microsoft::Gelu": define(lambda x: aten("gelu", x, approximate="none")),
    "com.microsoft::Inverse": define(lambda x: aten("linalg_inv", x)),
    "com.microsoft::MatMulNBits": matmul_n_bits,
    "com.microsoft::QuickGelu": define(lambda x, alpha=1.702: x * aten("sigmoid", x * alpha)),
    "com.microsoft::SkipLayerNormalization": skip_norm("aten.layer_norm.default", 4),
    "com.microsoft::SkipSimplifiedLayerNormalization": skip_norm("aten.rms_norm.default", 3),
    "com.microsoft::Trilu": triangle,
}
