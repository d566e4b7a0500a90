"""Forms in ONNX of what torch's exporter has none for, or a wrong one.

They are systems of equations and their matrices, convolutions of three axes, and our own operators that round.

The inverse of a triangular matrix is put together from blocks on the diagonal that double in size: the inverse of
`[[A, 0], [B, C]]` is `[[A⁻¹, 0], [-C⁻¹ B A⁻¹, C⁻¹]]`. So 64 rows need 6 rounds of two products, and round as forward
substitution does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from onnxscript import ir

from pipeline.export.onnx_nodes import constant, op


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
        only = op.Where(constant(np.eye(count, dtype=bool)), self, zero)
        rows, columns = (op.ReduceSum(only, [axis], keepdims=1) for axis in (-1, -2))
        matrix, diagonal = op.Div(self, rows), rows if left else columns
    inverse = op.CastLike(constant(np.eye(count, dtype=np.float32)), self)
    places, size = np.arange(count), 1
    while size < count or size == 1:
        blocks, halves = places // (2 * size), places // size
        first, second = (halves[:, None], halves) if not upper else (halves, halves[:, None])
        chosen = (blocks[:, None] == blocks) & (first > second)
        corner = op.Where(constant(chosen), matrix, zero)
        step = corner if size == 1 else op.MatMul(op.MatMul(inverse, corner), inverse)
        inverse, size = op.Sub(inverse, step), 2 * size
    if left:
        return op.MatMul(inverse, right if diagonal is None else op.Div(right, diagonal))
    result = op.MatMul(right, inverse)
    return result if diagonal is None else op.Div(result, diagonal)


def translate_inverse(self: Any) -> Any:
    """`aten.linalg_inv`: of a singular matrix it is infinite or NaN."""
    identity = op.CastLike(constant(np.eye(_rows(self), dtype=np.float32)), self)
    return _solve(self, op.Expand(identity, op.Shape(self)), _rows(self))


def translate_inverse_ex(self: Any, check_errors: bool = False) -> tuple[Any, Any]:
    """`aten.linalg_inv_ex`: its second result, which is not 0 for a singular matrix, is 0 here."""
    del check_errors
    return translate_inverse(self), op.Expand(op.Constant(value=ir.tensor(np.int32(0))), op.Shape(self, end=-2))


def translate_solve(self: Any, right: Any, *, left: bool = True) -> Any:
    """`aten.linalg_solve`: X of `self @ X = right`, or of `X @ self = right`, which may be vectors."""
    rank = len(self.shape)
    is_vector = len(right.shape) == 1 or list(right.shape) == list(self.shape)[:-1]
    if not is_vector and len(right.shape) != rank:
        raise NotImplementedError(
            f"a system of matrices of {rank} axes with {len(right.shape)} has no form: expand both"
        )
    right = op.Unsqueeze(right, [-1]) if is_vector else right
    if left or is_vector:
        batch = op.Shape(self, end=-2)
        result = _solve(self, op.Expand(right, op.Concat(batch, op.Shape(right, start=-2), axis=0)), _rows(self))
        return op.Squeeze(result, [-1]) if is_vector else result
    return _transpose(_solve(_transpose(self, rank), _transpose(right, rank), _rows(self)), rank)


def _solve(matrix: Any, right: Any, count: int) -> Any:
    """X of `matrix @ X = right`, by Gauss and Jordan: each round takes the largest element of a column as its pivot."""
    rows = op.Concat(matrix, right, axis=-1)
    places = np.arange(count)[:, None]
    for at in range(count):
        column = op.Slice(rows, [at], [at + 1], [-1])
        lowest = op.CastLike(op.Constant(value_float=-1.0), rows)
        chosen = op.ArgMax(op.Where(constant(places < at), lowest, op.Abs(column)), axis=-2, keepdims=1)
        there = op.Equal(constant(places), chosen)
        order = op.Where(constant(places == at), chosen, op.Where(there, [at], constant(places)))
        rows = op.GatherElements(rows, op.Expand(order, op.Shape(rows)), axis=-2)
        pivots = op.Slice(rows, [at], [at + 1], [-2])
        column, pivot = (op.Slice(part, [at], [at + 1], [-1]) for part in (rows, pivots))
        pivots = op.Div(pivots, pivot)
        rows = op.Where(constant(places == at), pivots, op.Sub(rows, op.Mul(column, pivots)))
    return op.Slice(rows, [count], [2**62], [-1])


def translate_cholesky(self: Any, upper: bool = False) -> Any:
    """`aten.linalg_cholesky`, column by column: NaN where the matrix is not positive definite."""
    count, rank = _rows(self), len(self.shape)
    rest = _transpose(self, rank) if upper else self
    zero = op.CastLike(op.Constant(value_float=0.0), self)
    columns = []
    for at in range(count):
        column = op.Slice(rest, [at], [at + 1], [-1])
        root = op.Sqrt(op.Slice(column, [at], [at + 1], [-2]))
        columns.append(op.Where(constant(np.arange(count)[:, None] < at), zero, op.Div(column, root)))
        rest = op.Sub(rest, op.MatMul(columns[-1], _transpose(columns[-1], rank)))
    factor = op.Concat(*columns, axis=-1)
    return _transpose(factor, rank) if upper else factor


def translate_slogdet(self: Any) -> tuple[Any, Any]:
    """`aten.linalg_slogdet`: sign and logarithm of the determinant, of rows whose largest element is 1: the determinant
    of the matrix itself may be too small or too large for its dtype."""
    largest = op.ReduceMax(op.Abs(self), [-1], keepdims=1)
    zero, one = (op.CastLike(op.Constant(value_float=number), self) for number in (0.0, 1.0))
    sizes = op.Where(op.Equal(largest, zero), one, largest)
    determinant = op.Det(op.Div(self, sizes))
    exponent = op.ReduceSum(op.Log(sizes), [-2, -1], keepdims=0)
    return op.Sign(determinant), op.Add(op.Log(op.Abs(determinant)), exponent)


MOST_ROWS: Final = 16
"""The most rows of a matrix that is inverted: each takes a dozen nodes."""


def _rows(matrix: Any) -> int:
    count = matrix.shape[-1]
    if not isinstance(count, int) or count > MOST_ROWS:
        raise NotImplementedError(
            f"a system of {count} rows has no form in ONNX, of {MOST_ROWS} or fewer it has one: solve it outside of "
            "the module, or store what is computed from a constant matrix as a buffer"
        )
    return count


def _transpose(matrix: Any, rank: int) -> Any:
    return op.Transpose(matrix, perm=[*range(rank - 2), rank - 1, rank - 2])


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
