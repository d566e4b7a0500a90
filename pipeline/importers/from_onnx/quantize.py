"""Quantized operators, in floating point: each is a chain of casts, products and roundings, as the standard defines it.

Products of integers are exact in float64, so integer products are computed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.importers.from_onnx.conv import convolution, kernel_of, read_window
from pipeline.importers.from_onnx.definitions import Term, cast, compute, reshape, term
from pipeline.importers.from_onnx.node import Importer, Node
from pipeline.ir.graph import Attr, TensorSpec

LIMITS = {"int4": (-8, 7), "uint4": (0, 15), "int2": (-2, 1), "uint2": (0, 3)}


def quantize_linear(node: Node, *, precision: int = 0, saturate: bool = True) -> None:
    """Integers of less than 8 bits are held in 8, within limits of their own."""
    node.attributes.settle("output_dtype")  # the output's type is known
    if precision not in (0, 1):
        raise node.refusal(f"it asks for the precision of the ONNX element type {precision}, expected that of float32")
    attrs = {"to": node.output().dtype, **places_of_scales(node)}
    if not saturate and node.output().dtype.startswith("float8"):
        attrs["saturate"] = False
    if narrow := node.element(2):
        node.scope.resolved.narrow[node.output_names[0]] = narrow
    if limits := LIMITS.get(narrow):
        attrs["low"], attrs["high"] = limits
    node.emit("onnxline.quantize.default", node.operands(), attrs)


def dequantize_linear(node: Node) -> None:
    node.attributes.settle("output_dtype")
    attrs = {"to": node.output().dtype, **places_of_scales(node)}
    node.emit("onnxline.dequantize.default", node.operands(), attrs)


def places_of_scales(node: Node) -> dict[str, Attr]:
    """The axis along which there are several scales, and how many positions share a scale; empty for a single scale."""
    spec, scale = node.spec(0), node.spec(1)
    axis = node.attributes.integer("axis", 1) % max(spec.rank, 1)
    block = node.attributes.integer("block_size")
    if scale.numel == 1 and scale.rank <= 1:
        return {}
    if scale.rank == 1 and scale.sizes[0] == spec.sizes[axis]:
        return {"axis": axis}
    if scale.rank != spec.rank or not block:
        raise node.refusal(
            f"it has scales of the shape {list(scale.shape)} and block_size {block} for {list(spec.shape)}"
        )
    return {"axis": axis, "block_size": block}


def less_zero_point(node: Node, place: int, zero: int, sizes: Sequence[int] | None = None) -> Term:
    """An integer operand minus its zero point, as float64; `sizes` lets a zero point of several numbers broadcast."""
    x = cast(term(node, node.operand(place)), "float64")
    if not node.has(zero):
        return x
    point = cast(term(node, node.operand(zero)), "float64")
    return x - spread(point, sizes)


def spread(numbers: Term, sizes: Sequence[int] | None) -> Term:
    """A single value without axes; several values in the shape `sizes`, if given."""
    if numbers.spec.numel == 1:
        return reshape(numbers, ())
    return numbers if sizes is None else reshape(numbers, sizes)


def product_of_integers(node: Node, a: tuple[int, int], b: tuple[int, int]) -> Term:
    """The product of two matrices of integers, each an input and its zero point, in float64.

    A zero point for each row of the left matrix is a column.
    """
    rows = (*node.spec(a[1]).sizes, 1) if node.has(a[1]) and node.spec(a[1]).rank == 1 else None
    spec = TensorSpec(node.output().shape, "float64")
    return Term(spec, "aten.matmul.default", (less_zero_point(node, *a, rows), less_zero_point(node, *b)))


def matmul_integer(node: Node) -> None:
    node.emit_conversion(compute(node, product_of_integers(node, (0, 2), (1, 3))))


def conv_integer(node: Node) -> None:
    node.emit_conversion(compute(node, convolution_of_integers(node, (0, 2), (1, 3))))


def convolution_of_integers(node: Node, x: tuple[int, int], w: tuple[int, int]) -> Term:
    """The convolution of integers in float64. Zeros are padded after the zero point was taken off."""
    column = (node.spec(w[0]).sizes[0], *(1,) * (node.spec(w[0]).rank - 1))
    operands = [compute(node, less_zero_point(node, *x)), compute(node, less_zero_point(node, *w, column))]
    operator, tensors, attrs = convolution(node, operands, read_window(node, kernel_of(node, w[0])))
    return term(node, node.step(operator, tensors, TensorSpec(node.output().shape, "float64"), attrs))


def q_linear_conv(node: Node) -> None:
    """Its inputs: x, scale, zero point; w, scale, zero point; scale and zero point of the result; bias."""
    product = convolution_of_integers(node, (0, 2), (3, 5))
    column = (1, product.spec.sizes[1], *(1,) * (product.spec.rank - 2))
    if node.has(8):
        product = product + reshape(cast(term(node, node.operand(8)), "float64"), column)
    requantize(node, product, column)


def q_linear_matmul(node: Node) -> None:
    """Its inputs: a, scale, zero point; b, scale, zero point; scale and zero point of the result."""
    requantize(node, product_of_integers(node, (0, 2), (3, 5)), None)


def requantize(node: Node, product: Term, channels: tuple[int, ...] | None) -> None:
    """The product, times the scales of both operands, over that of the result; `channels` shapes the second one."""
    left, right, result = (cast(term(node, node.operand(place)), "float64") for place in (1, 4, 6))
    if channels is not None and right.spec.numel > 1:
        right = reshape(right, channels)
    if left.spec.rank == 1 and left.spec.numel > 1:
        left = reshape(left, (*left.spec.sizes, 1))
    operands = [compute(node, product * left * right), compute(node, result), node.operand(7)]
    node.emit("onnxline.quantize.default", operands, {"to": node.output().dtype})


IMPORTERS: dict[str, Importer] = {
    "ConvInteger": conv_integer,
    "DequantizeLinear": dequantize_linear,
    "MatMulInteger": matmul_integer,
    "QLinearConv": q_linear_conv,
    "QLinearMatMul": q_linear_matmul,
    "QuantizeLinear": quantize_linear,
}
