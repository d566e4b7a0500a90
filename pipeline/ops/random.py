"""Kinds that draw numbers. Each has its seed as an attribute, so that every run draws the same numbers."""

from __future__ import annotations

from dataclasses import replace

from pipeline.ops.kinds import Kind
from pipeline.ops.rows import OpCall, floating, kind, signature


def makes_floats(call: OpCall) -> str | None:
    """What is drawn is floating point."""
    return floating(replace(call, ins=call.outs))


def same_shape(call: OpCall) -> str | None:
    """Every output has the shape of input 0."""
    wrong = [out.shape for out in call.outs if out.shape != call.ins[0].shape]
    return f"an output of shape {wrong[0]}; expected {call.ins[0].shape}" if wrong else None


def probability(call: OpCall) -> str | None:
    """The share of elements that Dropout puts to zero; at 1 the others would be scaled by infinity."""
    ratio = call.attrs["ratio"]
    return None if isinstance(ratio, float) and 0 <= ratio < 1 else f"attr ratio={ratio}; expected 0 ≤ ratio < 1"


def samples(call: OpCall) -> str | None:
    """Multinomial: for each row of log-probabilities a row of places, int32 or int64."""
    x, out = call.ins[0], call.outs[0]
    if x.rank != 2 or out.rank != 2:
        return f"ranks {x.rank} and {out.rank}; expected rows of log-probabilities, and rows of places"
    return None if out.dtype in ("int32", "int64") else f"places of dtype {out.dtype}; expected int32 or int64"


def dropout_outputs(call: OpCall) -> str | None:
    """Dropout: a result like the input, and the mask of what was kept."""
    found, wanted = (call.outs[0].dtype, call.outs[1].dtype), (call.ins[0].dtype, "bool")
    return same_shape(call) if found == wanted else f"outputs of {found}; expected {wanted}"


KINDS = (
    kind(Kind.RandomNormal, signature(makes_floats, inputs=0), "mean=f,scale=f,seed=i"),
    kind(Kind.RandomUniform, signature(makes_floats, inputs=0), "low=f,high=f,seed=i"),
    kind(Kind.Bernoulli, signature(floating, same_shape), "seed=i"),
    kind(Kind.Multinomial, signature(floating, samples), "seed=i"),
    kind(Kind.Dropout, signature(floating, probability, dropout_outputs, outputs=2), "ratio=f,seed=i"),
)
