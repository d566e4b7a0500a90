"""Elementwise forms. Where a kind rounds or compares, its gradient is zero or none, as torch has it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional

from pipeline.ops import Kind
from pipeline.runtime.functional.base import Attrs, Form, Ins, Specs, only
from pipeline.runtime.tensors import torch_dtype

UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})

FLOAT32_IS_LINEAR_FROM = 50.0
"""softplus(x) and x are the same number from here on, in float64 too."""


def whole(function: Callable[..., torch.Tensor]) -> Form:
    """The form of a function of two tensors that torch's CPU lacks for unsigned integers of 16 bits and more.

    These are computed in int64, which wraps around as they do; a uint64 of 2⁶³ or more is beyond it.
    """

    def form(ins: Ins, _: Attrs, outs: Specs) -> torch.Tensor:
        if ins[0].dtype not in UNSIGNED:
            return function(*ins)
        return function(*(tensor.long() for tensor in ins)).to(torch_dtype(outs[0].dtype))

    return form


def divide(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.div(left, right, rounding_mode=None if left.is_floating_point() else "trunc")


def power(ins: Ins, _: Attrs, __: Specs) -> torch.Tensor:
    """The result has the dtype of the base."""
    base, exponent = ins
    if exponent.is_floating_point() and not base.is_floating_point():
        return torch.pow(base.double(), exponent.double()).to(base.dtype)
    return torch.pow(base, exponent.to(base.dtype))


def modulo(ins: Ins, attrs: Attrs, outs: Specs) -> torch.Tensor:
    return whole(torch.fmod if attrs["fmod"] else torch.remainder)(ins, attrs, outs)  # type: ignore[return-value]


def prelu(x: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    return torch.where(x >= 0, x, x * slope)


def hard_sigmoid(ins: Ins, attrs: Attrs, _: Specs) -> torch.Tensor:
    return torch.clamp(ins[0] * attrs["alpha"] + attrs["beta"], 0, 1)


def clip(ins: Ins, attrs: Attrs, outs: Specs) -> torch.Tensor:
    """A limit that the declared dtype cannot reach limits nothing."""
    dtype = torch_dtype(outs[0].dtype)
    reach = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    low = None if attrs["min"] < reach.min else attrs["min"]
    high = None if attrs["max"] > reach.max else attrs["max"]
    return ins[0].clone() if low is None and high is None else torch.clamp(ins[0], low, high)


def cast(ins: Ins, attrs: Attrs, _: Specs) -> torch.Tensor:
    """A cast to float8 saturates, as ONNX's default has it."""
    x, dtype = ins[0], torch_dtype(attrs["to"])
    if attrs["to"].startswith("float8") and x.is_floating_point():
        x = x.float().clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    return x.to(dtype)


FORMS: dict[Kind, Form] = {
    Kind.Add: whole(torch.add),
    Kind.Sub: whole(torch.sub),
    Kind.Mul: whole(torch.mul),
    Kind.Div: whole(divide),
    Kind.Pow: power,
    Kind.Min: whole(torch.minimum),
    Kind.Max: whole(torch.maximum),
    Kind.Mod: modulo,
    Kind.PRelu: only(prelu),
    Kind.And: only(torch.logical_and),
    Kind.Or: only(torch.logical_or),
    Kind.Xor: only(torch.logical_xor),
    Kind.Equal: whole(torch.eq),
    Kind.Less: whole(torch.lt),
    Kind.LessOrEqual: whole(torch.le),
    Kind.Greater: whole(torch.gt),
    Kind.GreaterOrEqual: whole(torch.ge),
    Kind.Not: only(torch.logical_not),
    Kind.Neg: only(torch.neg),
    Kind.Abs: only(torch.abs),
    Kind.Sign: only(torch.sign),
    Kind.Relu: only(torch.relu),
    Kind.Clip: clip,
    Kind.Identity: only(torch.clone),
    Kind.Sqrt: only(torch.sqrt),
    Kind.Reciprocal: only(torch.reciprocal),
    Kind.Exp: only(torch.exp),
    Kind.Log: only(torch.log),
    Kind.Floor: only(torch.floor),
    Kind.Ceil: only(torch.ceil),
    Kind.Round: only(torch.round),
    Kind.Sin: only(torch.sin),
    Kind.Cos: only(torch.cos),
    Kind.Erf: only(torch.erf),
    Kind.Tanh: only(torch.tanh),
    Kind.Sigmoid: only(torch.sigmoid),
    Kind.Gelu: lambda ins, attrs, _: functional.gelu(ins[0], approximate=attrs["approximate"]),
    Kind.Silu: only(functional.silu),
    Kind.LeakyRelu: lambda ins, attrs, _: functional.leaky_relu(ins[0], attrs["alpha"]),
    Kind.Elu: lambda ins, attrs, _: functional.elu(ins[0], attrs["alpha"]),
    Kind.HardSigmoid: hard_sigmoid,
    Kind.HardSwish: only(functional.hardswish),
    Kind.Softplus: lambda ins, _, __: functional.softplus(ins[0], threshold=FLOAT32_IS_LINEAR_FROM),
    Kind.IsNaN: only(torch.isnan),
    Kind.IsInf: lambda ins, _, __: torch.abs(ins[0]) == math.inf,
    Kind.Where: only(torch.where),
    Kind.Cast: cast,
}
