"""Elementwise kinds: output element i depends on input elements i only, with numpy broadcasting."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.ir.builder import Emitter
from pipeline.ir.graph import Attr
from pipeline.lowering.emitter import Specs, emitter, floating, one_of, same_dtype
from pipeline.lowering.kinds import Kind
from pipeline.lowering.layout import Layout, ViewRule

__all__ = ["EMITTERS", "INPLACE", "VIEWS"]


def unary(kind: Kind, layout: str = "") -> Emitter:
    return emitter(kind, layout, same_dtype)


def smooth(kind: Kind, layout: str = "") -> Emitter:
    """One floating-point input, an output like it."""
    return emitter(kind, layout, same_dtype, floating)


def binary(kind: Kind, layout: str = "") -> Emitter:
    return emitter(kind, layout, same_dtype, inputs=2)


def comparison(kind: Kind) -> Emitter:
    return emitter(kind, "", alike_to_bool, inputs=2)


def logical(kind: Kind) -> Emitter:
    return emitter(kind, "", same_dtype, to_bool, inputs=2)


def to_bool(attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> str | None:
    del attrs, ins
    return None if outs[0].dtype == "bool" else f"output dtype {outs[0].dtype}; expected bool"


def alike_to_bool(attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> str | None:
    return same_dtype(attrs, ins, ()) or to_bool(attrs, ins, outs)


def like_the_base(attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> str | None:
    """Pow: the exponent may have a dtype of its own."""
    return same_dtype(attrs, ins[:1], outs)


def choice(attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> str | None:
    """Where: a bool condition, then two values alike."""
    if ins[0].dtype != "bool":
        return f"condition dtype {ins[0].dtype}; expected bool"
    return same_dtype(attrs, ins[1:], outs)


def to_target(attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> str | None:
    del ins
    return None if attrs["to"] == outs[0].dtype else f"attr to={attrs['to']!r}, but the output is {outs[0].dtype}"


def to_float8(attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> str | None:
    """Other types have no cast that saturates, and so none that does not."""
    del attrs, ins
    return None if outs[0].dtype.startswith("float8") else f"output dtype {outs[0].dtype}; expected a float8 type"


def unchanged(attrs: Mapping[str, Attr], source: Layout, outs: Specs) -> tuple[Layout]:
    del attrs, outs
    return (source,)


EMITTERS: dict[str, Emitter] = {
    "Add": binary(Kind.Add),
    "Sub": binary(Kind.Sub),
    "Mul": binary(Kind.Mul),
    "Div": binary(Kind.Div),
    "Pow": emitter(Kind.Pow, "", like_the_base, inputs=2),
    "Min": binary(Kind.Min),
    "Max": binary(Kind.Max),
    "Mod": binary(Kind.Mod, "fmod=?"),
    "PRelu": binary(Kind.PRelu),
    "And": logical(Kind.And),
    "Or": logical(Kind.Or),
    "Xor": logical(Kind.Xor),
    "Equal": comparison(Kind.Equal),
    "Less": comparison(Kind.Less),
    "LessOrEqual": comparison(Kind.LessOrEqual),
    "Greater": comparison(Kind.Greater),
    "GreaterOrEqual": comparison(Kind.GreaterOrEqual),
    "Not": emitter(Kind.Not, "", same_dtype, to_bool),
    "Neg": unary(Kind.Neg),
    "Abs": unary(Kind.Abs),
    "Sign": unary(Kind.Sign),
    "Relu": unary(Kind.Relu),
    "Clip": unary(Kind.Clip, "min=n,max=n"),
    "Identity": unary(Kind.Identity),
    "Sqrt": smooth(Kind.Sqrt),
    "Reciprocal": smooth(Kind.Reciprocal),
    "Exp": smooth(Kind.Exp),
    "Log": smooth(Kind.Log),
    "Floor": smooth(Kind.Floor),
    "Ceil": smooth(Kind.Ceil),
    "Round": smooth(Kind.Round),
    "Sin": smooth(Kind.Sin),
    "Cos": smooth(Kind.Cos),
    "Erf": smooth(Kind.Erf),
    "Tanh": smooth(Kind.Tanh),
    "Sigmoid": smooth(Kind.Sigmoid),
    "Gelu": emitter(Kind.Gelu, "approximate=s", same_dtype, floating, one_of("approximate", "none", "tanh")),
    "Silu": smooth(Kind.Silu),
    "LeakyRelu": smooth(Kind.LeakyRelu, "alpha=f"),
    "Elu": smooth(Kind.Elu, "alpha=f"),
    "HardSigmoid": smooth(Kind.HardSigmoid, "alpha=f,beta=f"),
    "HardSwish": smooth(Kind.HardSwish),
    "Softplus": smooth(Kind.Softplus),
    "IsNaN": emitter(Kind.IsNaN, "", floating, to_bool),
    "IsInf": emitter(Kind.IsInf, "", floating, to_bool),
    "Where": emitter(Kind.Where, "", choice, inputs=3),
    "Cast": emitter(Kind.Cast, "to=s", to_target),
    "CastUnsaturated": emitter(Kind.CastUnsaturated, "to=s", to_target, to_float8),
}

# Which input's storage output 0 may take. The planner still asks for the same shape and dtype, so a broadcast input
# and a comparison's operands drop out by themselves.
INPLACE: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Mod", "And", "Or", "Xor"), (0, 1)),
    **dict.fromkeys(("Neg", "Abs", "Sign", "Relu", "Clip", "Not", "Sqrt", "Reciprocal", "Exp", "Log"), (0,)),
    **dict.fromkeys(("Floor", "Ceil", "Round", "Sin", "Cos", "Erf", "Tanh", "Sigmoid", "Gelu", "Silu"), (0,)),
    **dict.fromkeys(("LeakyRelu", "Elu", "HardSigmoid", "HardSwish", "Softplus"), (0,)),
    "PRelu": (0,),
    "Where": (1, 2),
}

VIEWS: dict[str, ViewRule] = {"Identity": unchanged}
