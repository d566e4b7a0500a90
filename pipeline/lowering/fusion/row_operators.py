"""Operators of torch as instructions of a row program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pipeline.ir.graph import InputRef, Op
from pipeline.lowering.fusion.op_patterns import FLOATS, constant_number
from pipeline.lowering.fusion.rewrite import producer
from pipeline.lowering.fusion.row_chain import RowChain, Translate
from pipeline.ops.row_programs import COMPARISONS, Operand


def _elementwise(name: str, *arguments: str) -> Translate:
    """One instruction on these arguments of the operator."""

    def translate(chain: RowChain, op: Op) -> Operand | None:
        if op.attrs.get("alpha", 1) != 1 or op.attrs.get("rounding_mode") is not None:
            return None
        operands = [chain.read(op, argument) for argument in arguments]
        found = [operand for operand in operands if operand is not None]
        return chain.call(name, *found) if len(found) == len(operands) else None

    return translate


def _comparison(name: str) -> Translate:
    """A comparison in float32; in another dtype torch compares what it has rounded, and a program has not rounded."""
    compare = _elementwise(name, "self", "other")

    def translate(chain: RowChain, op: Op) -> Operand | None:
        is_rounded = any(chain.graph.values[vid].spec.dtype != "float32" for vid in op.inputs)
        return None if is_rounded else compare(chain, op)

    return translate


def _power(chain: RowChain, op: Op) -> Operand | None:
    exponent = op.attrs.get("exponent")
    if isinstance(exponent, InputRef):
        exponent = constant_number(chain.graph, op.inputs[exponent.index])
    name = (
        {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}.get(exponent)
        if isinstance(exponent, int | float)
        else None
    )
    base = chain.read(op, "self") if name else None
    return None if base is None or name is None else chain.call(name, base)


def _gelu(chain: RowChain, op: Op) -> Operand | None:
    x = chain.read(op, "self")
    name = "gelu_tanh" if op.attrs.get("approximate") == "tanh" else "gelu"
    return None if x is None else chain.call(name, x)


def _clamp(chain: RowChain, op: Op) -> Operand | None:
    x = chain.read(op, "self")
    for name, bound in (("maximum", op.attrs.get("min")), ("minimum", op.attrs.get("max"))):
        if isinstance(bound, InputRef) or x is None:
            return None
        if isinstance(bound, int | float):
            x = chain.call(name, x, float(bound))
    return x


def _masked_fill(chain: RowChain, op: Op) -> Operand | None:
    value, mask, x = (chain.read(op, name) for name in ("value", "mask", "self"))
    return None if value is None or mask is None or x is None else chain.call("where", mask, value, x)


def _cast(chain: RowChain, op: Op) -> Operand | None:
    """A cast between floats: a program computes in float32, and rounds its result alone."""
    source = chain.graph.values[op.inputs[0]].spec.dtype
    return chain.value(op.inputs[0]) if source in FLOATS and len(op.inputs) == 1 else None


def _softmax(chain: RowChain, op: Op) -> Operand | None:
    is_row = chain.has_short_rows and chain.is_last(op.attrs.get("dim")) and chain.has_whole_rows(op.outputs[0])
    if not is_row or op.attrs.get("dtype") is not None:
        return None
    x = chain.read(op, "self")
    if x is None:
        return None
    powers = chain.call("exp", chain.call("sub", x, chain.call("amax", x)))
    return chain.call("div", powers, chain.call("sum", powers))


def _layer_norm(chain: RowChain, op: Op) -> Operand | None:
    x, epsilon = _read_normalized(chain, op), op.attrs.get("eps", 1e-5)
    if x is None or not isinstance(epsilon, int | float):
        return None
    centred = chain.call("sub", x, chain.call("mean", x))
    return _scale(chain, op, centred, float(epsilon), ("mul", "weight"), ("add", "bias"))


def _rms_norm(chain: RowChain, op: Op) -> Operand | None:
    x, epsilon = _read_normalized(chain, op), op.attrs.get("eps")
    return (
        None
        if x is None or not isinstance(epsilon, int | float)
        else _scale(chain, op, x, float(epsilon), ("mul", "weight"))
    )


def _read_normalized(chain: RowChain, op: Op) -> Operand | None:
    shape = op.attrs.get("normalized_shape")
    is_row = isinstance(shape, tuple) and shape == tuple(chain.space.shape[-1:]) and chain.has_short_rows
    return chain.read(op, "input") if is_row else None


def _scale(chain: RowChain, op: Op, x: Operand, epsilon: float, *after: tuple[str, str]) -> Operand | None:
    """x / sqrt(mean(x²) + epsilon), then the instructions `after` with an argument of the operator where it has one."""
    mean = chain.call("mean", chain.call("square", x))
    found = chain.call("mul", x, chain.call("rsqrt", chain.call("add", mean, epsilon)))
    for name, argument in after:
        if op.attrs.get(argument) is None:
            continue
        other = chain.read(op, argument)
        if other is None:
            return None
        found = chain.call(name, found, other)
    return found


def _reduction(name: str) -> Translate:
    """An element for each row."""

    def translate(chain: RowChain, op: Op) -> Operand | None:
        dims = op.attrs.get("dim")
        is_row = isinstance(dims, tuple) and len(dims) == 1 and chain.is_last(dims[0])
        keeps = op.attrs.get("keepdim") is True and op.attrs.get("dtype") is None
        if not (is_row and keeps and chain.has_short_rows and chain.has_whole_rows(op.inputs[0])):
            return None
        x = chain.value(op.inputs[0])
        return None if x is None else chain.call(name, x)

    return translate


def _rotation(chain: RowChain, op: Op) -> Operand | None:
    """cat(-x[..., n/2:], x[..., :n/2]): the second half of a row, negated, before its first half."""
    if len(op.inputs) != 2 or not chain.is_last(op.attrs.get("dim", 0)) or not chain.has_short_rows:
        return None
    negated, second = (producer(chain.graph, vid) for vid in op.inputs)
    if negated is None or second is None or negated.kind != "aten.neg.default":
        return None
    first, half = producer(chain.graph, negated.inputs[0]), chain.space.sizes[-1] // 2
    if first is None or first.inputs[:1] != second.inputs[:1] or chain.space.sizes[-1] % 2:
        return None
    if _slice_of_rows(chain, negated.inputs[0]) != (half, 2 * half) or _slice_of_rows(chain, op.inputs[1]) != (0, half):
        return None
    x = chain.operand(first.inputs[0]) if chain.has_whole_rows(first.inputs[0]) else None
    return None if x is None else chain.call("rotate", x)


def _slice_of_rows(chain: RowChain, vid: int) -> tuple[int, int] | None:
    """(first, end) of a part of the last axis: a slice with step 1, or a piece."""
    size, op = chain.space.sizes[-1], producer(chain.graph, vid)
    if op is None or op.attrs.get("dim", 0) not in (-1, chain.space.rank - 1):
        return None
    if op.kind in PIECES:
        lengths = [chain.graph.values[piece].spec.sizes[-1] for piece in op.outputs[: op.outputs.index(vid) + 1]]
        return sum(lengths[:-1]), sum(lengths)
    if op.kind != "aten.slice.Tensor" or op.attrs.get("step", 1) != 1:
        return None
    start, end = op.attrs.get("start") or 0, op.attrs.get("end")
    end = size if end is None else end
    if not isinstance(start, int) or not isinstance(end, int):
        return None
    return start, min(end, size)


PIECES: Final = ("aten.chunk.default", "aten.split.Tensor", "aten.split_with_sizes.default")

BINARY: Final = ("add", "sub", "mul", "div")

UNARY: Final = (
    "neg",
    "abs",
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "square",
    "sin",
    "cos",
    "erf",
    "tanh",
    "sigmoid",
    "relu",
    "silu",
)

TRANSLATIONS: Final[Mapping[str, Translate]] = {
    **{f"aten.{name}.Tensor": _elementwise(name, "self", "other") for name in BINARY},
    **{f"aten.{name}.Scalar": _elementwise(name, "self", "other") for name in BINARY},
    **{f"aten.{name}.Tensor": _comparison(name) for name in COMPARISONS},
    **{f"aten.{name}.Scalar": _comparison(name) for name in COMPARISONS},
    "aten.rsub.Scalar": _elementwise("sub", "other", "self"),
    "aten.maximum.default": _elementwise("maximum", "self", "other"),
    "aten.minimum.default": _elementwise("minimum", "self", "other"),
    **{f"aten.{name}.default": _elementwise(name, "self") for name in UNARY},
    "aten.clamp_min.default": _elementwise("maximum", "self", "min"),
    "aten.where.self": _elementwise("where", "condition", "self", "other"),
    "aten.where.ScalarSelf": _elementwise("where", "condition", "self", "other"),
    "aten.where.ScalarOther": _elementwise("where", "condition", "self", "other"),
    "aten.masked_fill.Scalar": _masked_fill,
    "aten.pow.Tensor_Scalar": _power,
    "aten.pow.Tensor_Tensor": _power,
    "aten.gelu.default": _gelu,
    "aten.clamp.default": _clamp,
    "aten._to_copy.default": _cast,
    "aten.softmax.int": _softmax,
    "aten.layer_norm.default": _layer_norm,
    "aten.rms_norm.default": _rms_norm,
    "aten.mean.dim": _reduction("mean"),
    "aten.sum.dim_IntList": _reduction("sum"),
    "aten.cat.default": _rotation,
}  # fmt: skip
"""Operator → its instructions. aten.amax has none: the maximum of Triton leaves NaN out, which a softmax has from its
sum."""
