"""Elementwise kinds: output element i depends on input elements i only, with numpy broadcasting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeline.ops.kinds import Kind
from pipeline.ops.layout import Layout
from pipeline.ops.rows import OpCall, floating, kind, one_of, rows, same_dtype, signature


def to_bool(call: OpCall) -> str | None:
    dtype = call.outs[0].dtype
    return None if dtype == "bool" else f"output dtype {dtype}; expected bool"


def same_input_dtype(call: OpCall) -> str | None:
    return same_dtype(replace(call, outs=()))


def dtype_of_base(call: OpCall) -> str | None:
    """Pow: the exponent may have a dtype of its own."""
    return same_dtype(replace(call, ins=call.ins[:1]))


def where_operands(call: OpCall) -> str | None:
    """Where: a bool condition, then two values of one dtype."""
    if call.ins[0].dtype != "bool":
        return f"condition dtype {call.ins[0].dtype}; expected bool"
    return same_dtype(replace(call, ins=call.ins[1:]))


def to_target(call: OpCall) -> str | None:
    to, dtype = call.attrs["to"], call.outs[0].dtype
    return None if to == dtype else f"attr to={to!r}, but the output is {dtype}"


def to_float8(call: OpCall) -> str | None:
    """CastUnsaturated is for float8 only: no other cast saturates."""
    dtype = call.outs[0].dtype
    return None if dtype.startswith("float8") else f"output dtype {dtype}; expected a float8 type"


def keep_layout(_attrs: Mapping[str, Any], source: Layout, _outs: object) -> tuple[Layout]:
    return (source,)


UNARY = signature(same_dtype)
FLOAT = signature(same_dtype, floating)
BINARY = signature(same_dtype, inputs=2)
LOGICAL = signature(same_dtype, to_bool, inputs=2)
COMPARISON = signature(same_input_dtype, to_bool, inputs=2)
FLOAT_TO_BOOL = signature(floating, to_bool)
GELU = signature(same_dtype, floating, one_of("approximate", "none", "tanh"))

KINDS = (
    *rows((Kind.Add, Kind.Sub, Kind.Mul, Kind.Div, Kind.Min, Kind.Max), BINARY, inplace=(0, 1)),
    kind(Kind.Mod, BINARY, "fmod=?", inplace=(0, 1)),
    kind(Kind.Pow, signature(dtype_of_base, inputs=2), inplace=(0, 1)),
    kind(Kind.PRelu, BINARY, inplace=(0,)),
    *rows((Kind.And, Kind.Or, Kind.Xor), LOGICAL, inplace=(0, 1)),
    *rows((Kind.Equal, Kind.Less, Kind.LessOrEqual, Kind.Greater, Kind.GreaterOrEqual), COMPARISON),
    kind(Kind.Not, signature(same_dtype, to_bool), inplace=(0,)),
    *rows((Kind.Neg, Kind.Abs, Kind.Sign, Kind.Relu), UNARY, inplace=(0,)),
    kind(Kind.Clip, UNARY, "min=n,max=n", inplace=(0,)),
    kind(Kind.Identity, UNARY, view=keep_layout),
    *rows((Kind.Sqrt, Kind.Reciprocal, Kind.Exp, Kind.Log, Kind.Sin, Kind.Cos, Kind.Erf), FLOAT, inplace=(0,)),
    *rows((Kind.Floor, Kind.Ceil, Kind.Round), FLOAT, inplace=(0,)),
    *rows((Kind.Tanh, Kind.Sigmoid, Kind.Silu, Kind.HardSwish, Kind.Softplus), FLOAT, inplace=(0,)),
    kind(Kind.Gelu, GELU, "approximate=s", inplace=(0,)),
    *rows((Kind.LeakyRelu, Kind.Elu), FLOAT, "alpha=f", inplace=(0,)),
    kind(Kind.HardSigmoid, FLOAT, "alpha=f,beta=f", inplace=(0,)),
    *rows((Kind.IsNaN, Kind.IsInf), FLOAT_TO_BOOL),
    kind(Kind.Where, signature(where_operands, inputs=3), inplace=(1, 2)),
    kind(Kind.Cast, signature(to_target), "to=s"),
    kind(Kind.CastUnsaturated, signature(to_target, to_float8), "to=s"),
)
