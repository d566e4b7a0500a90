"""A row program while it grows from its result to its operands, and the order in which a call has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from pipeline.ir.graph import Graph, InputRef, Op, TensorSpec
from pipeline.lowering.fusion.op_patterns import FLOATS, constant_number
from pipeline.lowering.fusion.rewrite import only_user
from pipeline.ops.row_programs import COMPARISONS, Computed, Input, Instruction, Operand

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
        if op.kind not in self.translations or len(op.outputs) != 1:
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
        oid = self.graph.values[vid].producer
        if oid is not None and only_user(self.graph, vid) is not None:
            made = self.take(self.graph.ops[oid])
            if made is not None:
                return made
        return self.operand(vid)

    def operand(self, vid: int) -> Operand | None:
        """A value that is computed outside of the program."""
        spec = self.graph.values[vid].spec
        padded = (1,) * (self.space.rank - spec.rank) + tuple(spec.shape)
        fits = len(padded) == self.space.rank and all(
            size in (1, wanted) for size, wanted in zip(padded, self.space.shape, strict=True)
        )
        if not fits or (spec.dtype not in FLOATS and spec.dtype != "bool"):
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
