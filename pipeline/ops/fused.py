"""Several operations in one call. No importer makes these kinds: the passes of `pipeline.lowering.fusion` do.

Operands that a call may lack come last, in the order of the attributes that say whether they are there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from pipeline.ir.graph import Dim, TensorSpec
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


Shape = tuple[Dim, ...]


class Activation(NamedTuple):
    """What a fused call computes on its result: a name of `ACTIVATIONS`, and its numbers."""

    name: str
    numbers: tuple[float, ...] = ()


PLAIN: Final = Activation("none")

ATTENTION_BACKENDS: Final = ("auto", "math", "flash", "efficient", "cudnn")
"""Kernels of attention, by torch's names; `auto`: torch chooses at each call."""

NORM = 4
"""Operands of a normalisation: scale, bias, mean, variance."""


def operands(least: int, **flags: int) -> Check:
    """`least` operands, and the number in `flags` more for each attribute that is set."""

    def check(call: OpCall) -> str | None:
        wanted = least + sum(more for flag, more in flags.items() if call.attrs[flag])
        return None if len(call.ins) == wanted else f"{len(call.ins)} inputs; expected {wanted} by {', '.join(flags)}"

    return check


def numbers_of_activation(call: OpCall) -> str | None:
    name, numbers = call.attrs["activation"], call.attrs["numbers"]
    wanted = ACTIVATIONS.get(str(name), 0)
    right = isinstance(numbers, tuple) and len(numbers) == wanted
    return None if right else f"attr numbers={numbers}; {name} has {wanted}"


def broadcasts(shape: Shape, result: Shape) -> bool:
    """Whether a tensor of `shape` can be added to one of the shape `result`."""
    axes = zip(reversed(shape), reversed(result), strict=False)
    return len(shape) <= len(result) and all(size in (1, wanted) for size, wanted in axes)


def find_misfit(call: OpCall, result: Shape, added: Iterable[TensorSpec]) -> str | None:
    """What is wrong where the first result has the shape `result`, to which the `added` operands are added."""
    if call.outs[0].shape != result:
        return f"it makes {list(call.outs[0].shape)}; expected {list(result)}"
    wrong = [list(spec.shape) for spec in added if not broadcasts(spec.shape, result)]
    return f"operands {wrong} are added to {list(result)}; expected shapes that broadcast to it" if wrong else None


def product_of_rows(call: OpCall) -> str | None:
    """Rows times a matrix; what is added broadcasts to the product."""
    x, weight = call.ins[:2]
    if not x.rank or weight.rank != 2:
        return f"ranks {x.rank} and {weight.rank}; expected rows and a matrix"
    depth, columns = reversed(weight.shape) if call.attrs["trans"] else weight.shape
    if x.shape[-1] != depth:
        return f"rows of {x.shape[-1]} and a matrix of {depth}; expected one depth"
    if call.attrs["bias"] and not broadcasts(call.ins[-1].shape, (columns,)):
        return f"a bias {list(call.ins[-1].shape)} of {columns} columns; expected a number for each"
    return find_misfit(call, (*x.shape[:-1], columns), call.ins[2 : 2 + call.attrs["add"]])


def convolution(call: OpCall) -> str | None:
    """The sizes of a convolution, by its strides, pads and dilations; images may have their channels last."""
    attrs, (x, weight), out = call.attrs, call.ins[:2], call.outs[0]
    if weight.rank != x.rank or out.rank != x.rank or (attrs["channels_last"] and x.rank != 4):
        return f"ranks {x.rank}, {weight.rank} and {out.rank}; expected one, and 4 with channels last"
    batch, channels, *sizes = by_channels(call, x.shape)
    filters, depth, *window = (int(size) for size in weight.shape)
    group, steps = attrs["group"], (attrs["strides"], attrs["dilations"])
    if group < 1 or min(map(min, steps)) < 1 or min(attrs["pads"]) < 0:
        return "a group, stride or dilation below 1, or a pad below 0"
    if channels != depth * group or filters % group:
        return f"{channels} channels and filters {list(weight.shape)} in {group} groups"
    rows = zip(sizes, window, attrs["pads"], *steps, strict=True)
    places = [(size + 2 * pad - rate * (taps - 1) - 1) // step + 1 for size, taps, pad, step, rate in rows]
    found, wanted = by_channels(call, out.shape), [batch, filters, *places]
    if found != wanted:
        return f"it makes {found}; expected {wanted} (batch, channels, sizes)"
    added = [by_channels(call, call.ins[2].shape)] if attrs["add"] and call.ins[2].rank == x.rank else []
    if attrs["add"] and added != [wanted]:
        return f"the tensor {list(call.ins[2].shape)} is added to {wanted}; expected the same shape"
    rest = [list(spec.shape) for spec in call.ins[2 + attrs["add"] :]]
    return (
        f"bias and normalisation {rest}; expected [{filters}] for each" if any(r != [filters] for r in rest) else None
    )


def by_channels(call: OpCall, shape: Shape) -> list[int]:
    """A shape as (batch, channels, sizes)."""
    sizes = [int(size) for size in shape]
    return [sizes[0], sizes[3], sizes[1], sizes[2]] if call.attrs["channels_last"] and len(sizes) == 4 else sizes


def result_of_heads(call: OpCall) -> str | None:
    """The result is (batch, tokens, heads, width of the values)."""
    query, key, value = (spec.shape for spec in call.ins[:3])
    if not all(broadcasts(shape[:2], query[:2]) for shape in (key, value)):
        return f"batch and heads {list(key[:2])} and {list(value[:2])} of {list(query[:2])}; expected as many, or one"
    scores = (*query[:3], key[2])
    if wrong := [list(mask.shape) for mask in call.ins[3:] if not broadcasts(mask.shape, scores)]:
        return f"a mask {wrong[0]} of the scores {list(scores)}; expected a shape that broadcasts to it"
    return find_misfit(call, (query[0], query[2], query[1], value[3]), ())


def product_with_relu(call: OpCall) -> str | None:
    """Two matrices, then the bias, then the gate, which is like the result."""
    (a, b, *more), out = call.ins, call.outs[0]
    if a.rank == b.rank == 2 and (a.shape[1] != b.shape[0] or out.shape != (a.shape[0], b.shape[1])):
        return f"a product of {list(a.shape)} and {list(b.shape)} → {list(out.shape)}"
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


def one_limit(call: OpCall) -> str | None:
    """A mask, or scores of the keys up to the query's place: torch takes no more than one of them."""
    return "a mask, and causal=True; expected one of them" if call.attrs["mask"] and call.attrs["causal"] else None


def scores_of_heads(call: OpCall) -> str | None:
    """The second result has a score for each query and key: (batch, heads, queries, keys)."""
    if heads(call):
        return heads(call)
    query, key = (spec.shape for spec in call.ins[:2])
    wanted, found = (*query[:3], key[2]), call.outs[1].shape
    if any(spec.shape[:2] != query[:2] for spec in call.ins) or call.ins[0].dtype != "float32":
        shown = ", ".join(map(str, call.ins))
        return f"query, key and value {shown}; expected float32, and one batch and heads for all"
    return None if found == wanted else f"scores {list(found)}; expected {list(wanted)}"


ACTIVATION = (one_of("activation", *ACTIVATIONS), numbers_of_activation)
LINEAR = signature(same_dtype, floating, operands(2, add=1, bias=1), product_of_rows, *ACTIVATION, inputs=(2, 4))
CONV = signature(
    same_dtype,
    floating,
    operands(2, add=1, bias=1, norm=NORM),
    *per_spatial_dim("strides", "pads", "dilations"),
    convolution,
    *ACTIVATION,
    inputs=(2, 4 + NORM),
)
ATTENTION = signature(
    same_dtype,
    floating,
    heads,
    result_of_heads,
    operands(3, mask=1),
    one_limit,
    one_of("backend", *ATTENTION_BACKENDS),
    inputs=(3, 4),
)
SMALL_ATTENTION = signature(same_dtype, floating, scores_of_heads, result_of_heads, inputs=(3, 3), outputs=2)

KINDS = (
    kind(Kind.LinearPointwise, LINEAR, "trans=?,add=?,bias=?,activation=s,numbers=f[]", version=2),
    kind(
        Kind.ConvPointwise,
        CONV,
        "strides=i[],pads=i[],dilations=i[],group=i,add=?,bias=?,norm=?,epsilon=f,channels_last=?,activation=s,numbers=f[]",
        inplace=(2,),
        version=2,
    ),
    kind(Kind.ScaledDotProductAttention, ATTENTION, "scale=f,mask=?,causal=?,backend=s", version=2),
    kind(Kind.SmallAttention, SMALL_ATTENTION, "scale=f"),
    kind(Kind.ReluProduct, signature(same_dtype, floating, product_with_relu, inputs=(2, 4)), "bias=?,gate=?"),
)
"""ReluProduct is a product with ReLU after it, or the gradient of one; the gate is then the result of that ReLU."""
