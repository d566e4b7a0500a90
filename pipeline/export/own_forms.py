"""Forms in ONNX of what torch's exporter has none for, or a wrong one.

They are systems with a triangular matrix, convolutions of three axes, and our own operators that round.

The inverse of a triangular matrix is put together from blocks on the diagonal that double in size: the inverse of
`[[A, 0], [B, C]]` is `[[A⁻¹, 0], [-C⁻¹ B A⁻¹, C⁻¹]]`. So 64 rows need 6 rounds of two products, and round as forward
substitution does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from onnxscript import ir
from onnxscript.onnx_opset import opset18

op: Final[Any] = opset18
"""Typed as Any: its annotations are for eager evaluation, and here it adds nodes to torch's graph."""


def translate_solve_triangular(
    self: Any, right: Any, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    """`aten.linalg_solve_triangular`: X of `self @ X = right`, or of `X @ self = right` where not `left`.

    Raises:
        NotImplementedError: the rows of the matrix are an open dim.
    """
    count = self.shape[-1]
    if not isinstance(count, int):
        raise NotImplementedError("a triangular system has a form in ONNX where the rows of its matrix are a number")
    zero = op.Constant(value=ir.tensor(0.0, self.dtype))
    matrix, diagonal = self, None
    if not unitriangular:  # self is a diagonal matrix times one with ones on its diagonal
        only = op.Where(_constant(np.eye(count, dtype=bool)), self, zero)
        rows, columns = (op.ReduceSum(only, op.Constant(value_ints=[axis]), keepdims=1) for axis in (-1, -2))
        matrix, diagonal = op.Div(self, rows), rows if left else columns
    inverse = op.CastLike(_constant(np.eye(count, dtype=np.float32)), self)
    places, size = np.arange(count), 1
    while size < count or size == 1:
        blocks, halves = places // (2 * size), places // size
        first, second = (halves[:, None], halves) if not upper else (halves, halves[:, None])
        chosen = (blocks[:, None] == blocks) & (first > second)
        corner = op.Where(_constant(chosen), matrix, zero)
        step = corner if size == 1 else op.MatMul(op.MatMul(inverse, corner), inverse)
        inverse, size = op.Sub(inverse, step), 2 * size
    if left:
        return op.MatMul(inverse, right if diagonal is None else op.Div(right, diagonal))
    result = op.MatMul(right, inverse)
    return result if diagonal is None else op.Div(result, diagonal)


def _constant(array: np.ndarray) -> Any:
    return op.Constant(value=ir.tensor(array))


def translate_conv3d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Any:
    """`aten.conv3d`; torch 2.13 takes the form for complex numbers, whose bias has two columns where none is given."""
    strides, pads, dilations = (list(sizes) * (3 // len(sizes)) for sizes in (stride, padding, dilation))
    given = (input, weight) if bias is None else (input, weight, bias)
    return op.Conv(*given, strides=strides, pads=pads * 2, dilations=dilations, group=groups)


def translate_quantize(self: Any, scale: Any, zero_point: Any = None, *, to: str, axis: int = 1) -> Any:
    """To int8 or uint8, with one scale, or one for each index of an axis; other arguments have no translation."""
    return op.QuantizeLinear(self, scale, _zeros(scale, to) if zero_point is None else zero_point, axis=axis)


def translate_dequantize(self: Any, scale: Any, zero_point: Any = None, *, to: str, axis: int = 1) -> Any:
    """To the dtype of the scales; see `translate_quantize`."""
    del to
    zero = _zeros(scale, str(self.dtype).lower()) if zero_point is None else zero_point
    return op.DequantizeLinear(self, scale, zero, axis=axis)


def _zeros(scale: Any, dtype: str) -> Any:
    return op.Constant(value=ir.tensor(np.zeros([int(size) for size in scale.shape], dtype)))
