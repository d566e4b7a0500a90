"""Kinds that draw numbers. Each has its seed as an attribute, so that every run draws the same."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.ir.builder import Emitter
from pipeline.ir.graph import Attr
from pipeline.lowering.emitter import Specs, emitter, floating
from pipeline.lowering.kinds import Kind
from pipeline.lowering.layout import ViewRule

__all__ = ["EMITTERS", "INPLACE", "VIEWS"]


def makes_floats(attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> str | None:
    """What is drawn is floating point."""
    del ins
    return floating(attrs, outs, outs)


def same_shape(attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> str | None:
    """Every output has the shape of input 0."""
    del attrs
    wrong = [out.shape for out in outs if out.shape != ins[0].shape]
    return f"an output of shape {wrong[0]}; expected {ins[0].shape}" if wrong else None


def probability(attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> str | None:
    """The share of elements that Dropout puts to zero; at 1 the others would be scaled by infinity."""
    del ins, outs
    ratio = attrs["ratio"]
    return None if isinstance(ratio, float) and 0 <= ratio < 1 else f"attr ratio={ratio}; expected 0 ≤ ratio < 1"


def samples(attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> str | None:
    """Multinomial: for each row of log-probabilities a row of places, int32 or int64."""
    del attrs
    if ins[0].rank != 2 or outs[0].rank != 2:
        return f"ranks {ins[0].rank} and {outs[0].rank}; expected rows of log-probabilities, and rows of places"
    right = outs[0].dtype in ("int32", "int64")
    return None if right else f"places of dtype {outs[0].dtype}; expected int32 or int64"


def masked(attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> str | None:
    """Dropout: a result like the input, and the mask of what was kept."""
    found = (outs[0].dtype, outs[1].dtype)
    wanted = (ins[0].dtype, "bool")
    return same_shape(attrs, ins, outs) if found == wanted else f"outputs of {found}; expected {wanted}"


EMITTERS: dict[str, Emitter] = {
    "RandomNormal": emitter(Kind.RandomNormal, "mean=f,scale=f,seed=i", makes_floats, inputs=0),
    "RandomUniform": emitter(Kind.RandomUniform, "low=f,high=f,seed=i", makes_floats, inputs=0),
    "Bernoulli": emitter(Kind.Bernoulli, "seed=i", floating, same_shape),
    "Multinomial": emitter(Kind.Multinomial, "seed=i", floating, samples),
    "Dropout": emitter(Kind.Dropout, "ratio=f,seed=i", floating, probability, masked, outputs=2),
}

INPLACE: dict[str, tuple[int, ...]] = {}

VIEWS: dict[str, ViewRule] = {}
