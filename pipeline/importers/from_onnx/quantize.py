"""Quantized operators, in floating point: each is a chain of casts, products and roundings, as the standard defines it.

Products of quantized numbers are exact in float64, so integer products are computed there.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.importers.from_onnx.conv import convolution, kernel_of, read_window
from pipeline.importers.from_onnx.node import Importer, Node
from pipeline.importers.from_onnx.shape import reshape
from pipeline.ir.graph import Attr, TensorSpec

LIMITS = {"int4": (-8, 7), "uint4": (0, 15), "int2": (-2, 1), "uint2": (0, 3)}


def quantize_linear(node: Node) -> None:
    """Whole numbers of less than 8 bits are held in 8, within limits of their own."""
    node.attributes.settle("output_dtype")  # the output's type is known
    precision = node.attributes.integer("precision")
    if precision not in (0, 1):
        raise node.refusal(f"it asks for the precision of the ONNX element type {precision}, expected that of float32")
    attrs = {"to": node.output().dtype, **places_of_scales(node)}
    if not node.attributes.flag("saturate", True) and node.output().dtype.startswith("float8"):
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
    """The axis along which there are several scales, and how many places share one; nothing for one scale."""
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


def spec_of(spec: TensorSpec, dtype: str) -> TensorSpec:
    return TensorSpec(spec.shape, dtype)


def subtract_zero_point(node: Node, operand: int, zero: int | None, shape: Sequence[int] | None = None) -> int:
    """An integer operand minus its zero point, as float64; `shape` lets the zero point broadcast."""
    spec = node.spec(operand)
    x = node.convert(node.operand(operand), "float64")
    if zero is None or not node.has(zero):
        return x
    point = node.convert(node.operand(zero), "float64")
    own = node.vid_spec(point)
    wanted = tuple(shape) if shape is not None and own.numel > 1 else () if own.numel == 1 else own.sizes
    if wanted != own.sizes:
        point = reshape(node, point, wanted)
    return node.step("aten.sub.Tensor", [x, point], TensorSpec(spec.shape, "float64"))


def matmul_integer(node: Node) -> None:
    a = subtract_zero_point(node, 0, 2, rows_of(node, 0, 2))
    b = subtract_zero_point(node, 1, 3)
    product = node.step("aten.matmul.default", [a, b], TensorSpec(node.output().shape, "float64"))
    node.emit_conversion(product)


def rows_of(node: Node, operand: int, zero: int) -> tuple[int, ...] | None:
    """A zero point for each row of the left matrix is a column."""
    if not node.has(zero) or node.spec(zero).rank != 1:
        return None
    return (*node.spec(zero).sizes, 1)


def conv_integer(node: Node) -> None:
    product = integer_conv(node, 0, 1, 2, 3)
    node.emit_conversion(product)


def integer_conv(node: Node, x: int, w: int, x_zero: int, w_zero: int) -> int:
    """The convolution of integers in float64. Zeros are padded after the zero point was taken off."""
    column = (node.spec(w).sizes[0], *(1,) * (node.spec(w).rank - 1))
    operands = [subtract_zero_point(node, x, x_zero), subtract_zero_point(node, w, w_zero, column)]
    operator, tensors, attrs = convolution(node, operands, read_window(node, kernel_of(node, w)))
    return node.step(operator, tensors, spec_of(node.output(), "float64"), attrs)


def q_linear_conv(node: Node) -> None:
    """Its inputs: x, scale, zero point; w, scale, zero point; scale and zero point of the result; bias."""
    product = integer_conv(node, 0, 3, 2, 5)
    spec = node.vid_spec(product)
    column = (1, spec.sizes[1], *(1,) * (spec.rank - 2))
    if node.has(8):
        bias = reshape(node, node.convert(node.operand(8), "float64"), column)
        product = node.step("aten.add.Tensor", [product, bias], spec)
    requantize(node, product, (1, 4, 6), 7, column)


def q_linear_matmul(node: Node) -> None:
    """Its inputs: a, scale, zero point; b, scale, zero point; scale and zero point of the result."""
    a, b = subtract_zero_point(node, 0, 2, rows_of(node, 0, 2)), subtract_zero_point(node, 3, 5)
    product = node.step("aten.matmul.default", [a, b], TensorSpec(node.output().shape, "float64"))
    requantize(node, product, (1, 4, 6), 7, None)


def requantize(
    node: Node, product: int, scales: tuple[int, int, int], zero: int, channels: tuple[int, ...] | None
) -> None:
    """The product, times the scales of both operands, over that of the result; `channels` shapes the second one."""
    left, right, result = (node.convert(node.operand(place), "float64") for place in scales)
    spec = node.vid_spec(product)
    if channels is not None and node.vid_spec(right).numel > 1:
        right = reshape(node, right, channels)
    if node.vid_spec(left).rank == 1 and node.vid_spec(left).numel > 1:
        left = reshape(node, left, (*node.vid_spec(left).sizes, 1))
    for factor in (left, right):
        product = node.step("aten.mul.Tensor", [product, factor], spec)
    node.emit("onnxline.quantize.default", [product, result, node.operand(zero)], {"to": node.output().dtype})


IMPORTERS: dict[str, Importer] = {
    "ConvInteger": conv_integer,
    "DequantizeLinear": dequantize_linear,
    "MatMulInteger": matmul_integer,
    "QLinearConv": q_linear_conv,
    "QLinearMatMul": q_linear_matmul,
    "QuantizeLinear": quantize_linear,
}
