"""Quantized operators, in floating point: each is a chain of casts, products and roundings, as the standard defines it.

Products of quantized numbers are exact in float64, so integer products are computed there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.importers.from_onnx.conv import conv_attrs
from pipeline.importers.from_onnx.moves import by_range, expand, move, reshape
from pipeline.importers.from_onnx.node import Importer, Node
from pipeline.ir.graph import TensorSpec

LIMITS = {"int4": (-8, 7), "uint4": (0, 15), "int2": (-2, 1), "uint2": (0, 3)}


def quantize_linear(node: Node) -> None:
    """round(x / scale) + zero point, within the range of the target type."""
    node.attributes.settle("output_dtype", "axis", "block_size")  # the output's type is known
    spec, out = node.spec(0), node.output()
    wide = widest(node, spec.dtype, node.spec(1).dtype)
    scale = along(node, node.operand(1), spec, wide)
    x = node.convert(node.operand(0), wide)
    zero = along(node, node.operand(2), spec, wide) if node.has(2) else None
    saturates = node.attributes.flag("saturate", True)
    quotient = node.step("aten.div.Tensor", [x, scale], TensorSpec(spec.shape, wide))
    if node.element(2):
        node.scope.resolved.narrow[node.output_names[0]] = node.element(2)
    to_type(node, quotient, zero, out.dtype, saturates, LIMITS.get(node.element(2)))


def widest(node: Node, *dtypes: str) -> str:
    """The type to compute in. 16-bit numbers are divided in float32, as a quotient of theirs would round twice."""
    precision = node.attributes.integer("precision")
    if precision not in (0, 1):
        raise node.refusal(f"it asks for the precision of the ONNX element type {precision}, expected that of float32")
    return "float64" if "float64" in dtypes else "float32"


def to_type(
    node: Node, quotient: int, zero: int | None, dtype: str, saturates: bool, limits: tuple[int, int] | None
) -> None:
    """The last steps of a quantization, from a quotient of floats."""
    spec = node.vid_spec(quotient)
    if dtype.startswith("float8"):
        # A float8 is rounded by its own cast, and its zero point is 0.
        if zero is not None:
            quotient = node.step("aten.add.Tensor", [quotient, zero], spec)
        node.emit_conversion(quotient, saturates=saturates)
        return
    rounded = node.step("aten.round.default", [quotient], spec)
    if zero is not None:
        rounded = node.step("aten.add.Tensor", [rounded, zero], spec)
    info = np.iinfo(dtype)
    low, high = limits or (int(info.min), int(info.max))
    limited = node.step("aten.clamp.default", [rounded], spec, {"min": float(low), "max": float(high)})
    node.emit_conversion(limited)


def dequantize_linear(node: Node) -> None:
    """(x - zero point) · scale. The difference is taken in float32, where numbers of up to 24 bits are exact."""
    node.attributes.settle("axis", "block_size", "output_dtype")
    spec, out = node.spec(0), node.output()
    wide = "float64" if out.dtype == "float64" or spec.dtype in ("int32", "uint32") else "float32"
    x = node.convert(node.operand(0), wide)
    if node.has(2):
        zero = along(node, node.operand(2), spec, wide)
        x = node.step("aten.sub.Tensor", [x, zero], TensorSpec(spec.shape, wide))
    scale = along(node, node.operand(1), spec, wide)
    if wide == out.dtype:
        node.emit("aten.mul.Tensor", [x, scale])
        return
    product = node.step("aten.mul.Tensor", [x, scale], TensorSpec(spec.shape, wide))
    node.emit_conversion(product)


def along(node: Node, vid: int, spec: TensorSpec, dtype: str) -> int:
    """A scale or zero point as floats that broadcast to `spec`: one, one for each place of an axis, or blocks."""
    vid = node.convert(vid, dtype)
    own = node.vid_spec(vid)
    if own.numel == 1 and own.rank <= 1:
        return vid if own.rank == 0 else reshape(node, vid, ())
    axis = node.attributes.integer("axis", 1) % max(spec.rank, 1)
    block = node.attributes.integer("block_size")
    if own.rank == 1:
        column = tuple(own.sizes[0] if at == axis else 1 for at in range(spec.rank))
        return reshape(node, vid, column)
    if own.rank != spec.rank or not block:
        raise node.refusal(
            f"it has scales of the shape {list(own.shape)} and block_size {block} for {list(spec.shape)}"
        )
    before, count, after = own.sizes[:axis], own.sizes[axis], own.sizes[axis + 1 :]
    wide = expand(node, reshape(node, vid, (*before, count, 1, *after)), (*before, count, block, *after))
    flat = (*before, count * block, *after)
    return move(node, reshape(node, wide, flat), *by_range(flat, axis, range(spec.sizes[axis])))


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
    return node.step("Conv", operands, spec_of(node.output(), "float64"), conv_attrs(node, w))


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
    for operator, factor in (("aten.mul.Tensor", left), ("aten.mul.Tensor", right), ("aten.div.Tensor", result)):
        product = node.step(operator, [product, factor], spec)
    point = node.convert(node.operand(zero), "float64")
    to_type(node, product, point, node.output().dtype, True, None)


IMPORTERS: dict[str, Importer] = {
    "ConvInteger": conv_integer,
    "DequantizeLinear": dequantize_linear,
    "MatMulInteger": matmul_integer,
    "QLinearConv": q_linear_conv,
    "QLinearMatMul": q_linear_matmul,
    "QuantizeLinear": quantize_linear,
}
