"""Several operations in one call. No importer makes these kinds: the passes of `pipeline.lowering.fusion` do.

Operands that a call may lack come last, in the order of the attributes that say whether they are there.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pipeline.ops.kinds import Kind
from pipeline.ops.rows import Check, OpCall, floating, kind, one_of, per_spatial_dim, same_dtype, signature

ACTIVATIONS = {
    "none": 0,
    "relu": 0,
    "gelu": 0,
    "gelu_tanh": 0,
    "silu": 0,
    "sigmoid": 0,
    "tanh": 0,
    "hardswish": 0,
    "clip": 2,
    "leaky_relu": 1,
}
"""Activation → how many numbers it has: the bounds of `clip`, the slope of `leaky_relu`."""


class Activation(NamedTuple):
    """What a fused call computes on its result: a name of `ACTIVATIONS`, and its numbers."""

    name: str
    numbers: tuple[float, ...] = ()


PLAIN: Final = Activation("none")

NORM = 4
"""Operands of a normalisation: scale, bias, mean, variance."""


def operands(least: int, **flags: int) -> Check:
    """`least` operands, and for each attribute that is set so many more."""

    def check(call: OpCall) -> str | None:
        wanted = least + sum(more for flag, more in flags.items() if call.attrs[flag])
        return None if len(call.ins) == wanted else f"{len(call.ins)} inputs; expected {wanted} by {', '.join(flags)}"

    return check


def numbers_of_activation(call: OpCall) -> str | None:
    name, numbers = call.attrs["activation"], call.attrs["numbers"]
    wanted = ACTIVATIONS.get(str(name), 0)
    right = isinstance(numbers, tuple) and len(numbers) == wanted
    return None if right else f"attr numbers={numbers}; {name} has {wanted}"


def product_with_relu(call: OpCall) -> str | None:
    """Two matrices, then the bias, then the gate, which is like the result."""
    (a, b, *more), out = call.ins, call.outs[0]
    wanted = [out.shape[1:]] * bool(call.attrs["bias"]) + [out.shape] * bool(call.attrs["gate"])
    if [a.rank, b.rank, out.rank] != [2, 2, 2] or [spec.shape for spec in more] != wanted:
        shapes = [list(spec.shape) for spec in call.ins]
        return f"operands {shapes} → {list(out.shape)}; expected two matrices, and what bias and gate say after them"
    return None


def heads(call: OpCall) -> str | None:
    """Operands of attention are (batch, heads, tokens, width); its result is (batch, tokens, heads, width)."""
    ranks = [spec.rank for spec in call.ins]
    if set(ranks) != {4}:
        return f"ranks {ranks}; expected 4 (batch, heads, tokens, width)"
    query, key, value = (spec.shape for spec in call.ins[:3])
    if key[2] != value[2] or query[3] != key[3]:
        shapes = ", ".join(str(list(shape)) for shape in (query, key, value))
        return f"query, key and value {shapes}; expected as many values as keys, and keys as wide as queries"
    return None


def scores_of_heads(call: OpCall) -> str | None:
    """The second result has a score for each query and key: (batch, heads, queries, keys)."""
    if heads(call):
        return heads(call)
    query, key = (spec.shape for spec in call.ins[:2])
    wanted, found = (*query[:3], key[2]), call.outs[1].shape
    return None if found == wanted else f"scores {list(found)}; expected {list(wanted)}"


def two_products(call: OpCall) -> str | None:
    """The first operand has rows, and each bias a number for each column; the second result is what is between.

    So no bias has the shape of the result, which may be written over the tensor that is added, and over nothing else.
    """
    (x, first, second), attrs = call.ins[:3], call.attrs
    if x.rank < 2 or first.rank != 2 or second.rank != 2:
        return f"ranks {x.rank}, {first.rank} and {second.rank}; expected rows and two matrices"
    between = first.shape[0 if attrs["trans_first"] else 1]
    wanted, found = (*x.shape[:-1], between), call.outs[1].shape
    if found != wanted:
        return f"hidden {list(found)}; expected {list(wanted)}"
    columns = [between] * attrs["bias_first"] + [second.shape[0 if attrs["trans_second"] else 1]] * attrs["bias_second"]
    biases = [list(spec.shape) for spec in call.ins[3 + attrs["add"] :]]
    expected = [[size] for size in columns]
    return None if biases == expected else f"biases {biases}; expected {expected}"


ACTIVATION = (one_of("activation", *ACTIVATIONS), numbers_of_activation)
LINEAR = signature(same_dtype, floating, operands(2, add=1, bias=1), *ACTIVATION, inputs=(2, 4))
CONV = signature(
    same_dtype,
    floating,
    operands(2, add=1, bias=1, norm=NORM),
    *per_spatial_dim("strides", "pads", "dilations"),
    *ACTIVATION,
    inputs=(2, 4 + NORM),
)
FEED_FORWARD = signature(
    same_dtype,
    floating,
    operands(3, add=1, bias_first=1, bias_second=1),
    two_products,
    *ACTIVATION,
    inputs=(3, 6),
    outputs=2,
)
ATTENTION = signature(same_dtype, floating, heads, operands(3, mask=1), inputs=(3, 4))

KINDS = (
    kind(Kind.LinearPointwise, LINEAR, "trans=?,add=?,bias=?,activation=s,numbers=f[]", version=2),
    kind(
        Kind.ConvPointwise,
        CONV,
        "strides=i[],pads=i[],dilations=i[],group=i,add=?,bias=?,norm=?,epsilon=f,channels_last=?,activation=s,numbers=f[]",
        inplace=(2,),
        version=2,
    ),
    kind(
        Kind.FeedForward,
        FEED_FORWARD,
        "trans_first=?,trans_second=?,add=?,bias_first=?,bias_second=?,activation=s,numbers=f[]",
        inplace=(3,),
    ),
    kind(Kind.ScaledDotProductAttention, ATTENTION, "scale=f,mask=?"),
    kind(Kind.SmallAttention, signature(same_dtype, floating, scores_of_heads, inputs=(3, 3), outputs=2), "scale=f"),
    kind(Kind.ReluProduct, signature(same_dtype, floating, product_with_relu, inputs=(2, 4)), "bias=?,gate=?"),
)
"""ReluProduct is a product with ReLU after it, or the gradient of one; the gate is then the result of that ReLU."""
