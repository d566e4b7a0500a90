"""Special functions that ONNX has no operator for: series and interpolations in float64, and comparisons that heed NaN.

An interpolation is a polynomial of Chebyshev through values that torch itself computes, in float64, when a model is
exported. torch decomposes its operators into those of `prims`, which are the keys of `SPECIAL`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
from onnxscript import ir

from pipeline.export.onnx_nodes import double, op

Array = np.ndarray[Any, np.dtype[Any]]


def _translate_without_nan(choose: Callable[..., Any]) -> Callable[..., Any]:
    """`fmax` or `fmin`: the other number where one is NaN."""

    def translate(self: Any, other: Any) -> Any:
        if not self.dtype.is_floating_point():
            return choose(self, other)
        return op.Where(op.IsNaN(self), other, op.Where(op.IsNaN(other), self, choose(self, other)))

    return translate


def translate_hypot(self: Any, other: Any) -> Any:
    """`hypot`: the larger one times a root of at most 2, so that no square overflows."""
    first, second = op.Abs(self), op.Abs(other)
    most, least = op.Max(first, second), op.Min(first, second)
    zero, one = (op.CastLike(op.Constant(value_float=number), self) for number in (0.0, 1.0))
    share = op.Div(least, op.Where(op.Equal(most, zero), one, most))
    length = op.Mul(most, op.Sqrt(op.Add(one, op.Mul(share, share))))
    return op.Where(op.Or(op.IsInf(first), op.IsInf(second)), op.Add(first, second), length)


def translate_signbit(self: Any) -> Any:
    """`signbit`: true of negative numbers and of negative zero."""
    zero = op.CastLike(op.Constant(value_float=0.0), self)
    is_negative = op.Less(self, zero)
    if not self.dtype.is_floating_point():
        return is_negative
    return op.Or(is_negative, op.And(op.Equal(self, zero), op.Less(op.Reciprocal(self), zero)))


def translate_copysign(self: Any, other: Any) -> Any:
    """`aten.copysign`, by a factor: onnxruntime's Where loses the sign of zero."""
    size = op.Abs(self if self.dtype.is_floating_point() else op.CastLike(self, other))
    minus, plus = (op.CastLike(op.Constant(value_float=sign), size) for sign in (-1.0, 1.0))
    return op.Mul(size, op.Where(translate_signbit(other), minus, plus))


def translate_digamma(self: Any) -> Any:
    """`digamma`: the asymptotic series at 8 and above, the recurrence below, and the reflection below 1/2."""
    x = _double(self)
    is_low = op.Less(x, double(0.5))
    z = op.Where(is_low, op.Sub(double(1.0), x), x)
    shift, steps = double(0.0), 8
    for step in range(steps):
        shift = op.Add(shift, op.Reciprocal(op.Add(z, double(float(step)))))
    large = op.Add(z, double(float(steps)))
    square, series = op.Reciprocal(op.Mul(large, large)), double(0.0)
    for factor in reversed(DIGAMMA):
        series = op.Mul(square, op.Add(double(factor), series))
    value = op.Sub(op.Sub(op.Log(large), op.Div(double(0.5), large)), op.Add(series, shift))
    fraction = op.Sub(x, op.Round(x))
    angle = op.Mul(double(math.pi), fraction)
    reflected = op.Sub(value, op.Div(op.Mul(double(math.pi), op.Cos(angle)), op.Sin(angle)))
    is_pole = op.And(op.Less(x, double(0.0)), op.Equal(fraction, double(0.0)))
    value = op.Where(is_low, op.Where(is_pole, double(math.nan), reflected), value)
    return op.CastLike(op.Where(op.Equal(x, double(0.0)), op.Neg(op.Reciprocal(x)), value), self)


DIGAMMA: Final = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12, -3617 / 8160)
"""Bernoulli's numbers of index 2k, each over 2k."""


def _translate_bessel(own: Callable[..., torch.Tensor], is_odd: bool, is_scaled: bool) -> Callable[..., Any]:
    """`i0`, `i1`, and with `is_scaled` both times exp(-|x|), which `own` of torch computes."""

    def translate(self: Any) -> Any:
        x = _double(self)
        size = op.Abs(x)
        near = _interpolate(
            lambda t: own(4 * (t + 1)), op.Sub(op.Div(op.Min(size, double(8.0)), double(4.0)), double(1.0))
        )
        far = op.Max(size, double(8.0))
        of_inverse = _interpolate(
            lambda t: own(16 / (t + 1)) * torch.sqrt(16 / (t + 1)), op.Sub(op.Div(double(16.0), far), double(1.0))
        )
        value = op.Where(op.Less(size, double(8.0)), near, op.Div(of_inverse, op.Sqrt(far)))
        value = value if is_scaled else op.Mul(value, op.Exp(size))
        return op.CastLike(op.Mul(value, op.Sign(x)) if is_odd else value, self)

    return translate


def translate_erfinv(self: Any) -> Any:
    """`erfinv` of float16 and float32 and, near ±1 with fewer digits, of float64."""
    x = _double(self)
    rest = op.Mul(op.Sub(double(1.0), x), op.Add(double(1.0), x))
    return op.CastLike(op.Mul(op.Sign(x), _inverse_of_tail(rest)), self)


def translate_ndtri(self: Any) -> Any:
    """`special.ndtri`: √2 · erfinv(2p - 1), from 1 - (2p - 1)² = 4p(1 - p), which is exact for small p."""
    p = _double(self)
    rest = op.Mul(op.Mul(double(4.0), p), op.Sub(double(1.0), p))
    size = op.Mul(double(math.sqrt(2)), _inverse_of_tail(rest))
    return op.CastLike(op.Mul(op.Sign(op.Sub(p, double(0.5))), size), self)


def _inverse_of_tail(rest: Any) -> Any:
    """|erfinv(x)| from `rest` = 1 - x², by a function of the root of its logarithm."""
    root = op.Sqrt(op.Max(op.Neg(op.Log(rest)), double(0.0)))
    half = double(FARTHEST / 2)
    value = _interpolate(_root_of_tail, op.Sub(op.Div(op.Min(root, double(FARTHEST)), half), double(1.0)), degree=40)
    outside = op.Where(op.Equal(rest, double(0.0)), double(math.inf), double(math.nan))
    return op.Where(op.Greater(rest, double(0.0)), op.Mul(value, root), outside)


def _root_of_tail(t: torch.Tensor) -> torch.Tensor:
    """z / r, where 1 - erf(z)² = exp(-r²) for r between 0 and `FARTHEST`, by bisection of the logarithm."""
    roots = (t + 1) * FARTHEST / 2
    low, high = torch.zeros_like(roots), torch.full_like(roots, FARTHEST)
    for _ in range(80):
        middle = (low + high) / 2
        log_of_tail = math.log(2) + torch.special.log_ndtr(-middle * math.sqrt(2)) + torch.log1p(torch.erf(middle))
        is_low = -log_of_tail < roots**2
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    return torch.where(roots > 1e-4, low / roots, math.sqrt(math.pi) / 2)


FARTHEST: Final = 27.0
"""The root of -log(4p) for the smallest p of float32, and a little more."""


def _interpolate(function: Callable[[torch.Tensor], torch.Tensor], t: Any, degree: int = 30) -> Any:
    """The polynomial of Chebyshev through values of `function` on [-1, 1], at `t`, by Clenshaw's recurrence."""

    def values(nodes: Array) -> Array:
        return function(torch.from_numpy(nodes)).numpy()

    first, *rest = np.polynomial.Chebyshev.interpolate(values, degree).coef
    later, last = double(0.0), double(0.0)
    twice = op.Mul(t, double(2.0))
    for factor in reversed(rest):
        later, last = op.Add(op.Sub(op.Mul(twice, later), last), double(factor)), later
    return op.Add(op.Sub(op.Mul(t, later), last), double(first))


def _double(value: Any) -> Any:
    return op.Cast(value, to=ir.DataType.DOUBLE.value)


def translate_rrelu(
    self: Any, noise: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Any:
    """`aten.rrelu_with_noise_functional` at inference: the mean of the bounds is the slope."""
    del generator
    if training:
        raise NotImplementedError("rrelu draws slopes in training; call module.eval() first")
    return op.LeakyRelu(self, alpha=(lower + upper) / 2), op.Identity(noise)


SPECIAL: Final[Mapping[str, Callable[..., Any]]] = {
    "prims.fmax.default": _translate_without_nan(op.Max),
    "prims.fmin.default": _translate_without_nan(op.Min),
    "prims.hypot.default": translate_hypot,
    "aten.signbit.default": translate_signbit,
    "aten.copysign.Tensor": translate_copysign,
    "prims.digamma.default": translate_digamma,
    "prims.bessel_i0.default": _translate_bessel(torch.special.i0e, is_odd=False, is_scaled=False),
    "prims.bessel_i0e.default": _translate_bessel(torch.special.i0e, is_odd=False, is_scaled=True),
    "prims.bessel_i1.default": _translate_bessel(torch.special.i1e, is_odd=True, is_scaled=False),
    "prims.bessel_i1e.default": _translate_bessel(torch.special.i1e, is_odd=True, is_scaled=True),
    "prims.erf_inv.default": translate_erfinv,
    "prims.ndtri.default": translate_ndtri,
    "aten.rrelu_with_noise_functional.default": translate_rrelu,
}
