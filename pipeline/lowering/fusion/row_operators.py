"""Operators of torch as instructions of a row program, which grows from its result to its operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from pipeline.ir.graph import Graph, InputRef, Op, TensorSpec
from pipeline.lowering.fusion.op_patterns import FLOATS, constant_number
from pipeline.lowering.fusion.rewrite import only_user, producer
from pipeline.ops.aten.typed import CONVERSIONS
from pipeline.ops.row_programs import (
    COMPARISONS,
    INSTRUCTIONS,
    REDUCTIONS,
    ROUNDINGS,
    Computed,
    Input,
    Instruction,
    Operand,
)

LONGEST_ROW: Final = 16384
"""Elements of a row that a block of a GPU holds in registers; a longer row is left to torch."""
MOST_OPERANDS: Final = 12
MOST_INSTRUCTIONS: Final = 64

Translate: TypeAlias = "Callable[[RowChain, Op], Operand | None]"
"""The instructions of an op; None if a program cannot compute it."""


@dataclass(slots=True)
class RowChain:
    """A program while it grows from its result to its operands."""

    graph: Graph
    space: TensorSpec
    """Of the result."""
    translations: Mapping[str, Translate]
    """By kind, the operators that a program can hold."""
    instructions: list[Instruction] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    """The vids of the operands."""
    ops: list[int] = field(default_factory=list)
    """The ops that the program stands for."""

    def take(self, op: Op) -> Operand | None:
        """The result of `op` as an operand, after its instructions; None if a program cannot compute it, and then the
        chain is as before."""
        if len(self.ops) == MOST_INSTRUCTIONS or not self._fits(op):  # so a long chain is no deep recursion
            return None
        before = (len(self.instructions), len(self.inputs), len(self.ops))
        self.ops.append(op.oid)
        made = self.translations[op.kind](self, op)
        if made is None or len(self.instructions) > MOST_INSTRUCTIONS:
            for grown, length in zip((self.instructions, self.inputs, self.ops), before, strict=True):
                del grown[length:]
            return None
        return made

    def _fits(self, op: Op) -> bool:
        """Whether the result has the shape of the space, or one element for each row of it.

        A result of bool is that of a comparison: other operators on bools do what no instruction on 0 and 1 does, such
        as `add`, whose result is at most 1.
        """
        if op.kind not in self.translations:
            return False
        spec = self.graph.values[op.outputs[0]].spec
        shapes = (self.space.shape, (*self.space.shape[:-1], 1))
        return spec.shape in shapes and (spec.dtype in FLOATS or (spec.dtype == "bool" and _is_comparison(op)))

    def call(self, name: str, *operands: Operand) -> Operand:
        """A further instruction."""
        self.instructions.append(Instruction(name, operands))
        return Computed(len(self.instructions) - 1)

    def read(self, op: Op, name: str) -> Operand | None:
        """The argument `name` of `op`: a number, what its producer computes in the program, or an operand."""
        argument = op.attrs.get(name)
        if isinstance(argument, bool | int | float):
            return float(argument)
        return self.value(op.inputs[argument.index]) if isinstance(argument, InputRef) else None

    def value(self, vid: int) -> Operand | None:
        """A value as an operand; None for a dtype that a program does not read."""
        number = constant_number(self.graph, vid)
        if number is not None:
            return float(number)
        oid, user = self.graph.values[vid].producer, only_user(self.graph, vid)
        if oid is not None and user is not None:
            made, dtype = self.take(self.graph.ops[oid]), self.graph.values[vid].spec.dtype
            if made is not None:  # what an operator of another dtype reads is rounded, as torch has stored it
                return made if self.graph.values[user.outputs[0]].spec.dtype == dtype else self.round(made, dtype)
        return self.operand(vid)

    def round(self, x: Operand, dtype: str) -> Operand:
        """A value as a tensor of `dtype` has it."""
        match x:
            case Computed(number):
                is_rounded = self.instructions[number].name == dtype
            case Input(number):
                is_rounded = self.graph.values[self.inputs[number]].spec.dtype in (dtype, "bool")
            case _:
                is_rounded = False
        return x if is_rounded or dtype not in ROUNDINGS else self.call(dtype, x)

    def operand(self, vid: int) -> Operand | None:
        """A value that is computed outside of the program, and that torch would spread to the shape of the space."""
        if self.graph.values[vid].spec.dtype not in {*FLOATS, "bool"}:
            return None
        if vid not in self.inputs:
            self.inputs.append(vid)
        return Input(self.inputs.index(vid))

    def has_whole_rows(self, vid: int) -> bool:
        """Whether a value has the shape of the space, so that a row of it is a row of the program."""
        return self.graph.values[vid].spec.shape == self.space.shape

    @property
    def has_short_rows(self) -> bool:
        """Whether a block of a GPU holds a whole row."""
        return self.space.sizes[-1] <= LONGEST_ROW

    def is_last(self, dim: object) -> bool:
        """Whether `dim` is the axis of the rows."""
        return dim in (-1, self.space.rank - 1)


def _is_comparison(op: Op) -> bool:
    return op.kind.removeprefix("aten.").partition(".")[0] in COMPARISONS


def _elementwise(name: str, *arguments: str) -> Translate:
    """One instruction on these arguments of the operator."""

    def translate(chain: RowChain, op: Op) -> Operand | None:
        if op.attrs.get("alpha", 1) != 1:
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
        if x is None or not isinstance(bound, int | float | None):
            return None
        if bound is not None:
            x = chain.call(name, x, float(bound))
    return x


def _masked_fill(chain: RowChain, op: Op) -> Operand | None:
    value, mask, x = (chain.read(op, name) for name in ("value", "mask", "self"))
    return None if value is None or mask is None or x is None else chain.call("where", mask, value, x)


def _cast(chain: RowChain, op: Op) -> Operand | None:
    """A cast to a float rounds, unless the program rounds anyway since its result is that of the cast."""
    is_result = chain.ops == [op.oid]
    x = chain.value(op.inputs[0])
    return x if is_result else _convert(chain, op, x)


def _convert(chain: RowChain, op: Op, x: Operand | None) -> Operand | None:
    """The first operand of `op` in the dtype of its result."""
    source, dtype = (chain.graph.values[vid].spec.dtype for vid in (op.inputs[0], op.outputs[0]))
    if x is None or source in (dtype, "bool"):
        return x
    return None if isinstance(x, float) else chain.round(x, dtype)


def _softmax(chain: RowChain, op: Op) -> Operand | None:
    """Also where it has a dtype, of which `RowChain` takes floats alone: torch converts the operand before."""
    is_row = chain.has_short_rows and chain.is_last(op.attrs.get("dim")) and chain.has_whole_rows(op.outputs[0])
    x = _convert(chain, op, chain.read(op, "self")) if is_row else None
    if x is None:
        return None
    powers = chain.call("exp", chain.call("sub", x, chain.call("amax", x)))
    return chain.call("div", powers, chain.call("sum", powers))


def _layer_norm(chain: RowChain, op: Op) -> Operand | None:
    x = _read_normalized(chain, op)
    if x is None:
        return None
    centred, epsilon = chain.call("sub", x, chain.call("mean", x)), float(op.attrs.get("eps", 1e-5))  # type: ignore[arg-type]
    return _scale(chain, op, centred, epsilon, ("mul", "weight"), ("add", "bias"))


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
    """An element for each row: the result keeps the axis, since it has one element there (see `RowChain`)."""

    def translate(chain: RowChain, op: Op) -> Operand | None:
        is_row = op.attrs.get("dim") in ((-1,), (chain.space.rank - 1,))
        if not (is_row and chain.has_short_rows and chain.has_whole_rows(op.inputs[0])):
            return None
        x = _convert(chain, op, chain.value(op.inputs[0]))
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
    if first is None or first.inputs[:1] != second.inputs[:1]:
        return None
    if _slice_of_rows(chain, negated.inputs[0]) != (half, 2 * half) or _slice_of_rows(chain, op.inputs[1]) != (0, half):
        return None
    x = chain.operand(first.inputs[0]) if chain.has_whole_rows(first.inputs[0]) else None
    return None if x is None else chain.call("rotate", x)


def _slice_of_rows(chain: RowChain, vid: int) -> tuple[int, int] | None:
    """(first, end) of a slice or a piece. Its axis is the last one, and its step is 1, where two halves of an operand
    have the shape of the operand together."""
    size, op = chain.space.sizes[-1], producer(chain.graph, vid)
    if op is not None and op.kind in PIECES:
        lengths = [chain.graph.values[piece].spec.sizes[-1] for piece in op.outputs[: op.outputs.index(vid) + 1]]
        return sum(lengths[:-1]), sum(lengths)
    if op is None or op.kind != "aten.slice.Tensor":
        return None
    start, end = op.attrs.get("start") or 0, op.attrs.get("end")
    end = size if end is None else end
    if not isinstance(start, int) or not isinstance(end, int):
        return None
    return start, min(end, size)


PIECES: Final = ("aten.chunk.default", "aten.split.Tensor", "aten.split_with_sizes.default")

BINARY: Final = ("add", "sub", "mul", "div")

NOT_ALONE: Final = REDUCTIONS | {"gelu", "gelu_tanh", "rotate", *ROUNDINGS}
"""Instructions of one operand that read a whole row, or that the arguments of an operator choose, or dtypes."""

UNARY: Final = [name for name, count in INSTRUCTIONS.items() if count == 1 and name not in NOT_ALONE]

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
    **dict.fromkeys((*CONVERSIONS, "aten.type_as.default"), _cast),
    "aten.softmax.int": _softmax,
    "aten.layer_norm.default": _layer_norm,
    "aten.rms_norm.default": _rms_norm,
    "aten.mean.dim": _reduction("mean"),
    "aten.sum.dim_IntList": _reduction("sum"),
    "aten.cat.default": _rotation,
}  # fmt: skip
"""Operator → its instructions. aten.amax has none: the maximum of Triton leaves NaN out, which a softmax has from its
sum."""
