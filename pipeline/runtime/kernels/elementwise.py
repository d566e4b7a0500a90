"""Elementwise kernels. Every one is safe when output 0 is one of the operands that their row lists as in place."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.nn import functional

from pipeline.ops import Kind
from pipeline.runtime.kernels.base import Attrs, Ins, Kernel, Launch, Outs, each_time
from pipeline.runtime.tensors import NOT_IN_NUMPY

aten = torch.ops.aten

GELU: Any = functional.gelu
"""A builtin with `out=`, which its type stub lacks."""

UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})

SOFTPLUS_LINEAR_FROM = 50.0
"""log(1 + exp(x)) and x are the same float64 from here on; torch's own default of 20 is right for float32 only."""


def unary(function: Callable[..., Any]) -> Kernel:
    """A kernel from a torch function of one tensor with `out=`."""

    def bind(ins: Ins, outs: Outs, _: Attrs) -> Launch:
        return partial(function, ins[0], out=outs[0])

    return bind


def binary(function: Callable[..., Any], unsigned: Callable[..., Any] | None = None) -> Kernel:
    """A kernel from a torch function of two tensors with `out=`; `unsigned` is numpy's, see `by_numpy`."""

    def bind(ins: Ins, outs: Outs, _: Attrs) -> Launch:
        if unsigned is not None and ins[0].dtype in UNSIGNED:
            return by_numpy(unsigned, ins, outs)
        return partial(function, ins[0], ins[1], out=outs[0])

    return bind


def by_numpy(function: Callable[..., Any], ins: Ins, outs: Outs) -> Launch:
    """Torch's CPU has no arithmetic for unsigned integers of 16 bits and more; numpy computes in the same memory."""
    return partial(_compute_by_numpy, function, ins, outs[0])


def _compute_by_numpy(function: Callable[..., Any], ins: Ins, out: torch.Tensor) -> None:
    with np.errstate(all="ignore"):  # what is divided by 0 is undefined
        function(*(tensor.numpy() for tensor in ins), out=out.numpy())


def div(ins: Ins, outs: Outs, _: Attrs) -> Launch:
    if ins[0].dtype in UNSIGNED:
        return by_numpy(np.floor_divide, ins, outs)
    rounding = None if outs[0].is_floating_point() else "trunc"
    return partial(torch.div, ins[0], ins[1], rounding_mode=rounding, out=outs[0])


def pow_(ins: Ins, outs: Outs, _: Attrs) -> None:
    """The exponent may have another dtype; the result has the dtype of the base."""
    base, exponent = ins
    if base.is_floating_point() and exponent.numel() == 1 and exponent.dim() <= base.dim():
        torch.pow(base, exponent.item(), out=outs[0])  # x² and x³ become products, ten times as fast as pow
    elif base.is_floating_point() or not exponent.is_floating_point():
        outs[0].copy_(torch.pow(base, exponent))
    else:
        outs[0].copy_(torch.pow(base.double(), exponent.double()))


def mod(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    """`fmod` takes the sign of the dividend, as C does; otherwise the sign of the divisor, as Python does."""
    if ins[0].dtype in UNSIGNED:
        return by_numpy(np.remainder, ins, outs)
    function = torch.fmod if attrs["fmod"] else torch.remainder
    return partial(function, ins[0], ins[1], out=outs[0])


def prelu(ins: Ins, outs: Outs, _: Attrs) -> None:
    torch.where(ins[0] < 0, ins[0] * ins[1], ins[0], out=outs[0])


def sign(ins: Ins, outs: Outs, _: Attrs) -> Launch:
    """NaN for NaN, for which torch has 0."""
    if not ins[0].is_floating_point():
        return partial(torch.sign, ins[0], out=outs[0])
    return partial(_sign_of_floats, ins[0], outs[0])


def _sign_of_floats(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.where(x != x, x, torch.sign(x), out=out)


def relu(ins: Ins, outs: Outs, _: Attrs) -> Launch:
    return partial(torch.clamp_min, ins[0], 0, out=outs[0])


def gelu(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    return partial(GELU, ins[0], approximate=attrs["approximate"], out=outs[0])


def leaky_relu(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    return partial(aten.leaky_relu.out, ins[0], attrs["alpha"], out=outs[0])


def elu(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    return partial(aten.elu.out, ins[0], attrs["alpha"], 1, 1, out=outs[0])


def hard_sigmoid(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    torch.mul(ins[0], attrs["alpha"], out=outs[0])
    outs[0].add_(attrs["beta"]).clamp_(0, 1)


def softplus(ins: Ins, outs: Outs, _: Attrs) -> Launch:
    return partial(aten.softplus.out, ins[0], 1, SOFTPLUS_LINEAR_FROM, out=outs[0])


def is_nan(ins: Ins, outs: Outs, _: Attrs) -> Launch:
    return partial(torch.ne, ins[0], ins[0], out=outs[0])


def is_inf(ins: Ins, outs: Outs, _: Attrs) -> None:
    torch.eq(ins[0].abs(), math.inf, out=outs[0])


def clip(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    """A bound beyond the dtype's range does not bind, so it is left out: torch refuses to convert it."""
    x = ins[0]
    range_of = torch.finfo(x.dtype) if x.is_floating_point() else torch.iinfo(x.dtype)
    low = attrs["min"] if attrs["min"] >= range_of.min else None
    high = attrs["max"] if attrs["max"] <= range_of.max else None
    if low is None and high is None:
        return partial(outs[0].copy_, x)
    return partial(torch.clamp, x, low, high, out=outs[0])


def where(ins: Ins, outs: Outs, _: Attrs) -> Launch:
    return partial(torch.where, ins[0], ins[1], ins[2], out=outs[0])


def cast(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    """Casts to float8 saturate, as ONNX's default asks; torch makes NaN of numbers that are too large."""
    x = ins[0]
    if attrs["to"].startswith("float8") and x.is_floating_point():
        return partial(_saturate, x, outs[0])
    return partial(outs[0].copy_, x)


def _saturate(x: torch.Tensor, out: torch.Tensor) -> None:
    limit = torch.finfo(out.dtype).max
    out.copy_(x.float().clamp(-limit, limit))


def cast_unsaturated(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    """Too large numbers become NaN or infinity, whichever the float8 type has; torch 2.13 saturates in one type."""
    x = ins[0].float() if ins[0].dtype in NOT_IN_NUMPY else ins[0]
    with np.errstate(all="ignore"):
        narrow = x.numpy().astype(np.dtype(getattr(ml_dtypes, attrs["to"])))
    outs[0].view(torch.uint8).copy_(torch.from_numpy(narrow.view(np.uint8)))


def identity(ins: Ins, outs: Outs, _: Attrs) -> Launch:
    return partial(outs[0].copy_, ins[0])


KERNELS: dict[Kind, Kernel] = {
    Kind.Add: binary(torch.add, np.add),
    Kind.Sub: binary(torch.sub, np.subtract),
    Kind.Mul: binary(torch.mul, np.multiply),
    Kind.Div: div,
    Kind.Pow: each_time(pow_),
    Kind.Min: binary(torch.minimum, np.minimum),
    Kind.Max: binary(torch.maximum, np.maximum),
    Kind.Mod: mod,
    Kind.PRelu: each_time(prelu),
    Kind.And: binary(torch.logical_and),
    Kind.Or: binary(torch.logical_or),
    Kind.Xor: binary(torch.logical_xor),
    Kind.Equal: binary(torch.eq, np.equal),
    Kind.Less: binary(torch.lt, np.less),
    Kind.LessOrEqual: binary(torch.le, np.less_equal),
    Kind.Greater: binary(torch.gt, np.greater),
    Kind.GreaterOrEqual: binary(torch.ge, np.greater_equal),
    Kind.Not: unary(torch.logical_not),
    Kind.Neg: unary(torch.neg),
    Kind.Abs: unary(torch.abs),
    Kind.Sign: sign,
    Kind.Relu: relu,
    Kind.Clip: clip,
    Kind.Identity: identity,
    Kind.Sqrt: unary(torch.sqrt),
    Kind.Reciprocal: unary(torch.reciprocal),
    Kind.Exp: unary(torch.exp),
    Kind.Log: unary(torch.log),
    Kind.Floor: unary(torch.floor),
    Kind.Ceil: unary(torch.ceil),
    Kind.Round: unary(torch.round),
    Kind.Sin: unary(torch.sin),
    Kind.Cos: unary(torch.cos),
    Kind.Erf: unary(torch.erf),
    Kind.Tanh: unary(torch.tanh),
    Kind.Sigmoid: unary(torch.sigmoid),
    Kind.Gelu: gelu,
    Kind.Silu: unary(aten.silu.out),
    Kind.LeakyRelu: leaky_relu,
    Kind.Elu: elu,
    Kind.HardSigmoid: each_time(hard_sigmoid),
    Kind.HardSwish: unary(aten.hardswish.out),
    Kind.Softplus: softplus,
    Kind.IsNaN: is_nan,
    Kind.IsInf: each_time(is_inf),
    Kind.Where: where,
    Kind.Cast: cast,
    Kind.CastUnsaturated: each_time(cast_unsaturated),
}
