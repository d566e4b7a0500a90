"""ONNX translations that torch's exporter lacks or has wrong: grouped products, `squeeze`, sums of frames, and so on.

An operator of `translation_table` is found by name, since a library registers its own when it is loaded. Scalars along
a dim have become vectors before (`program_rewrites.unsqueeze_scalars`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from onnxscript import ir
from onnxscript.function_libs.torch_lib.ops.nn import aten_avg_pool2d, aten_avg_pool3d

from pipeline.export.index_forms import INDEXED
from pipeline.export.onnx_nodes import double, op
from pipeline.export.ordered_forms import ORDERED
from pipeline.export.own_forms import (
    translate_cholesky,
    translate_conv3d,
    translate_dequantize,
    translate_inverse,
    translate_inverse_ex,
    translate_quantize,
    translate_slogdet,
    translate_solve,
    translate_solve_triangular,
)
from pipeline.export.pooling_forms import POOLS
from pipeline.export.special_forms import SPECIAL


def translate_grouped_mm(
    mat_a: Any, mat_b: Any, offs: Any = None, bias: Any = None, out_dtype: int | None = None
) -> Any:
    """`aten._grouped_mm`: rows `offs[g - 1]:offs[g]` of `mat_a` (rows, k) by `mat_b[g]` (k, n).

    Rows after the last group come out as zeros. Without `offs` both are stacks of matrices.
    """
    ranks = (len(mat_a.shape), len(mat_b.shape))
    if ranks == (3, 3) and offs is None:
        return _finish(op.MatMul(mat_a, mat_b), bias, out_dtype)
    groups = mat_b.shape[0]
    if ranks != (2, 3) or offs is None or not isinstance(groups, int):
        raise NotImplementedError(
            f"a grouped product of {ranks[0]}-D and {ranks[1]}-D has no form in ONNX; expected rows that are grouped, "
            "2-D, by a stack of matrices, 3-D, whose count is a number"
        )
    ends = _split(op.Cast(offs, to=ir.DataType.INT64.value), groups)
    products = []
    for begin, end, matrix in zip([[0], *ends[:-1]], ends, _split(mat_b, groups), strict=True):
        products.append(op.MatMul(op.Slice(mat_a, begin, end, [0]), op.Squeeze(matrix, [0])))
    rows, width = op.Shape(mat_a, start=0, end=1), op.Shape(mat_b, start=2, end=3)
    zero = op.CastLike(op.Constant(value_floats=[0.0]), mat_a)
    rest = op.Expand(zero, op.Concat(op.Sub(rows, ends[-1]), width, axis=0))
    return _finish(op.Concat(*products, rest, axis=0), bias, out_dtype)


def _split(value: Any, count: int) -> Sequence[Any]:
    return op.Split(value, axis=0, num_outputs=count) if count > 1 else [value]


def _finish(product: Any, bias: Any, out_dtype: int | None) -> Any:
    if bias is not None:  # torch 2.13 refuses one itself
        raise NotImplementedError("a grouped product with a bias has no form in ONNX; add the bias afterwards")
    return product if out_dtype in (None, -1) else op.Cast(product, to=out_dtype)


def translate_squeeze(self: Any, dim: int | Sequence[int] | None = None) -> Any:
    """`aten.squeeze`: a dim of another size than 1 stays, for which ONNX's Squeeze fails; so does an open dim, which
    torch.export takes for 2 or more."""
    shape = list(self.shape)
    dims = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    axes = sorted({axis % len(shape) for axis in dims}) if shape else []
    axes = [axis for axis in axes if shape[axis] == 1]
    return op.Squeeze(self, axes) if axes else op.Identity(self)


def translate_copy(self: Any, src: Any, non_blocking: bool = False) -> Any:
    """`aten.copy`, as `copy_` is traced: `src` in the shape of `self`, which torch's own form leaves out."""
    del non_blocking
    value = op.Identity(src) if src.dtype == self.dtype else op.CastLike(src, self)
    is_of_one_shape = list(src.shape) == list(self.shape)
    return value if is_of_one_shape else op.Expand(value, op.Shape(self))


def _translate_average(own: Callable[..., Any], rank: int) -> Callable[..., Any]:
    """`aten.avg_pool2d` or `aten.avg_pool3d`: `own`, torch's form of it, leaves `divisor_override` out."""

    def translate(
        self: Any,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        padding = list(padding) * (rank if len(padding) == 1 else 1)
        if divisor_override is None:
            return own(self, kernel_size, stride, padding, ceil_mode, count_include_pad)
        if ceil_mode:
            raise NotImplementedError(
                "an average by divisor_override with ceil_mode has no form in ONNX; pad the input"
            )
        count = math.prod(kernel_size) ** (rank if len(kernel_size) == 1 else 1)
        factor = op.CastLike(op.Constant(value_float=count / divisor_override), self)
        return op.Mul(own(self, kernel_size, stride, padding, False, True), factor)

    return translate


def _translate_extreme(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """`aten.amax` or `aten.amin`: without dims over all of them."""

    def translate(self: Any, dim: int | Sequence[int] = (), keepdim: bool = False) -> Any:
        dims = [dim] if isinstance(dim, int) else list(dim)
        return reduce(self, *([dims] if dims else []), keepdims=int(keepdim)) if self.shape else op.Identity(self)

    return translate


def translate_prod(self: Any, dim: int, keepdim: bool = False, dtype: int | None = None) -> Any:
    """`aten.prod.dim_int`: integers and bools are counted in int64."""
    kind = dtype if dtype not in (None, -1) else None if self.dtype.is_floating_point() else ir.DataType.INT64.value
    factors = self if kind is None else op.Cast(self, to=kind)
    return op.ReduceProd(factors, [dim], keepdims=int(keepdim))


def translate_atan2(self: Any, other: Any) -> Any:
    """`aten.atan2`: torch's own form turns negative numbers with a zero above them to -π."""
    half = op.CastLike(op.Constant(value_float=math.pi), self)
    zero = op.CastLike(op.Constant(value_float=0.0), self)
    angle = op.Atan(op.Div(self, other))
    shifted = op.Add(angle, op.Where(op.GreaterOrEqual(self, zero), half, op.Neg(half)))
    angle = op.Where(op.Less(other, zero), shifted, angle)
    return op.Where(op.And(op.Equal(self, zero), op.Equal(other, zero)), zero, angle)


def translate_unfold_backward(grad_in: Any, input_sizes: Any, dim: int, size: int, step: int) -> Any:
    """`aten.unfold_backward`, the sum of frames that overlap, as `istft` needs it: torch's own form has indices of 32
    bits, which ONNX's ScatterND does not take."""
    rank = len(grad_in.shape) - 1
    axis = dim % rank
    whole = [*range(axis + 1), rank, *range(axis + 1, rank)]  # frames and places in a frame side by side
    frames = op.Range(0, op.Squeeze(op.Shape(grad_in, start=axis, end=axis + 1)), 1)
    starts = op.Unsqueeze(op.Mul(frames, step), [1])
    places = op.Reshape(op.Add(starts, list(range(size))), [-1])
    shape = [
        op.Shape(grad_in, start=0, end=axis),
        op.Constant(value_ints=[-1]),
        op.Shape(grad_in, start=axis + 1, end=rank),
    ]
    values = op.Reshape(op.Transpose(grad_in, perm=whole), op.Concat(*shape, axis=0), allowzero=1)
    column = op.Reshape(places, [-1, *[1] * (rank - 1 - axis)])
    sizes = input_sizes
    if isinstance(sizes, Sequence):
        parts = [op.Constant(value_ints=[part]) if isinstance(part, int) else op.Reshape(part, [1]) for part in sizes]
        sizes = op.Concat(*parts, axis=0)
    zeros = op.Expand(op.CastLike(op.Constant(value_floats=[0.0]), grad_in), sizes)
    # torch takes the frames of a window for those of each signal of a batch
    values = op.Expand(values, op.Shape(op.Slice(zeros, [0], [1], [axis])))
    return op.ScatterElements(zeros, op.Expand(column, op.Shape(values)), values, axis=axis, reduction="add")


def translate_cdist(x1: Any, x2: Any, p: float, compute_mode: int | None = None) -> Any:
    """`aten._cdist_forward`: the norm of each row's difference from each other row."""
    del compute_mode  # by products or by differences: the same, but for rounding
    rows, others = (op.Unsqueeze(rows, [at]) for rows, at in ((x1, -2), (x2, -3)))
    apart = op.Abs(op.Sub(rows, others))
    if p == 0:
        zero = op.CastLike(op.Constant(value_float=0.0), x1)
        return op.ReduceSum(op.CastLike(op.Not(op.Equal(apart, zero)), x1), [-1], keepdims=0)
    if p in NORMS:
        return NORMS[p](apart, [-1], keepdims=0)
    power, root = (op.CastLike(op.Constant(value_float=exponent), x1) for exponent in (p, 1 / p))
    return op.Pow(op.ReduceSum(op.Pow(apart, power), [-1], keepdims=0), root)


NORMS: Final[Mapping[float, Callable[..., Any]]] = {1: op.ReduceL1, 2: op.ReduceL2, math.inf: op.ReduceMax}


def translate_lgamma(self: Any) -> Any:
    """`aten.lgamma` by the series of Lanczos (g = 7, 9 terms: 15 digits) in float64, below 1/2 by its reflection."""

    x, half, one = op.Cast(self, to=ir.DataType.DOUBLE.value), double(0.5), double(1.0)
    is_low = op.Less(x, half)
    z = op.Sub(op.Where(is_low, op.Sub(one, x), x), one)
    series = double(LANCZOS[0])
    for place, term in enumerate(LANCZOS[1:], 1):
        series = op.Add(series, op.Div(double(term), op.Add(z, double(float(place)))))
    shifted = op.Add(z, double(7.5))
    value = op.Sub(op.Mul(op.Add(z, half), op.Log(shifted)), shifted)
    value = op.Add(op.Add(value, op.Log(series)), double(math.log(2 * math.pi) / 2))
    sine = op.Abs(op.Sin(op.Mul(double(math.pi), op.Sub(x, op.Floor(x)))))
    reflected = op.Sub(op.Sub(double(math.log(math.pi)), op.Log(sine)), value)
    value = op.Where(is_low, reflected, value)
    return op.CastLike(op.Where(op.IsInf(x), op.Abs(x), value), self)


LANCZOS: Final = (
    0.99999999999980993,
    676.5203681218851,
    -1259.1392167224028,
    771.32342877765313,
    -176.61502916214059,
    12.507343278686905,
    -0.13857109526572012,
    9.9843695780195716e-6,
    1.5056327351493116e-7,
)


def translate_log_sigmoid(self: Any) -> Any:
    """`aten.log_sigmoid`: torch's own form is minus infinity where the sigmoid has become 0."""
    return op.Neg(_softplus(op.Neg(self)))


def _softplus(value: Any) -> Any:
    """log(1 + exp(value)); onnxruntime has Softplus for float32 alone."""
    one = op.CastLike(op.Constant(value_float=1.0), value)
    return op.Add(op.Relu(value), op.Log(op.Add(op.Exp(op.Neg(op.Abs(value))), one)))


def _translate_log_of_sum(base: float) -> Callable[..., Any]:
    """`aten.logaddexp` or `aten.logaddexp2`: torch's own form overflows for a power that has no float."""

    def translate(self: Any, other: Any) -> Any:
        scale, log_of_two = (op.CastLike(double(math.log(number)), self) for number in (base, 2.0))
        rest = _softplus(op.Neg(op.Mul(op.Abs(op.Sub(self, other)), scale)))
        rest = op.Where(op.Equal(self, other), log_of_two, rest)
        return op.Add(op.Max(self, other), op.Div(rest, scale))

    return translate


def translate_erfcx(self: Any) -> Any:
    """`aten.special_erfcx`, exp(x²) · erfc(x), by a series of Chebyshev (Press et al., erfccheb: 15 digits) in float64.

    torch's own form multiplies infinity by 0 for x of 10 and more.
    """

    x = op.Cast(self, to=ir.DataType.DOUBLE.value)
    size, two = op.Abs(x), double(2.0)
    t = op.Div(two, op.Add(size, two))
    powers = op.Pow(op.Unsqueeze(op.Sub(op.Mul(t, two), double(1.0)), [-1]), double(POWERS))
    value = op.Mul(t, op.Exp(op.MatMul(powers, double(np.polynomial.chebyshev.cheb2poly(ERFCX)))))
    mirrored = op.Sub(op.Mul(two, op.Exp(op.Mul(x, x))), value)
    return op.CastLike(op.Where(op.Less(x, double(0.0)), mirrored, value), self)


ERFCX: Final = (
    -1.3026537197817094 / 2, 6.4196979235649026e-1, 1.9476473204185836e-2, -9.561514786808631e-3,
    -9.46595344482036e-4, 3.66839497852761e-4, 4.2523324806907e-5, -2.0278578112534e-5, -1.624290004647e-6,
    1.303655835580e-6, 1.5626441722e-8, -8.5238095915e-8, 6.529054439e-9, 5.059343495e-9, -9.91364156e-10,
    -2.27365122e-10, 9.6467911e-11, 2.394038e-12, -6.886027e-12, 8.94487e-13, 3.13092e-13, -1.12708e-13,
)  # fmt: skip
POWERS: Final = np.arange(float(len(ERFCX)))


EXTREMES: Final[Mapping[str, Callable[..., Any]]] = {
    "aten.amax.default": _translate_extreme(op.ReduceMax),
    "aten.amin.default": _translate_extreme(op.ReduceMin),
    "aten.prod.dim_int": translate_prod,
}

SQUEEZE: Final[Mapping[str, Callable[..., Any]]] = {
    f"aten.squeeze.{overload}": translate_squeeze for overload in ("default", "dim", "dims")
}

GROUPED_MM: Final[Mapping[str, Callable[..., Any]]] = {
    "aten._grouped_mm.default": translate_grouped_mm,
    "transformers.grouped_mm_fallback.default": translate_grouped_mm,
}


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Operator → translation, for the operators that are registered in this process."""
    rows = ((_operator(name), translate) for name, translate in TRANSLATIONS.items())
    return {operator: translate for operator, translate in rows if operator is not None}


def _operator(name: str) -> Any:
    """`aten._grouped_mm.default` of `torch.ops`; None where no library has registered it."""
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)


TRANSLATIONS: Final[Mapping[str, Callable[..., Any]]] = {
    **GROUPED_MM,
    **SQUEEZE,
    **EXTREMES,
    **INDEXED,
    **ORDERED,
    **POOLS,
    **SPECIAL,
    "aten.copy.default": translate_copy,
    "aten.conv3d.default": translate_conv3d,
    "aten.avg_pool2d.default": _translate_average(aten_avg_pool2d, 2),
    "aten.avg_pool3d.default": _translate_average(aten_avg_pool3d, 3),
    "aten.unfold_backward.default": translate_unfold_backward,
    "onnxline.quantize.default": translate_quantize,
    "onnxline.dequantize.default": translate_dequantize,
    "aten.atan2.default": translate_atan2,
    "aten._cdist_forward.default": translate_cdist,
    "aten.lgamma.default": translate_lgamma,
    "aten.logaddexp.default": _translate_log_of_sum(math.e),
    "aten.logaddexp2.default": _translate_log_of_sum(2.0),
    "aten.log_sigmoid.default": translate_log_sigmoid,
    "aten.special_erfcx.default": translate_erfcx,
    "aten.linalg_solve_triangular.default": translate_solve_triangular,
    "aten.linalg_inv.default": translate_inverse,
    "aten.linalg_inv_ex.default": translate_inverse_ex,
    "aten.inverse.default": translate_inverse,
    "aten.linalg_solve.default": translate_solve,
    "aten.linalg_slogdet.default": translate_slogdet,
    "aten.linalg_cholesky.default": translate_cholesky,
}
