"""Row programs: chains of operators that compute each row of a result from the same row of their operands.

A row is the last axis. A program is text, one instruction after the other, and its last instruction is the result:

    sub(i0, i1); exp(v0); sum(v1); div(v1, v2)

`i0` is the first operand of the call, `v1` what the instruction numbered 1 computed, and a number is itself. Operands
are broadcast to the shape of the result. All instructions compute in float32, and the result is rounded once, to its
dtype. `float16(v1)` and `bfloat16(v1)` round on the way, as a cast to that dtype does.

`rotate(i0)` reads a row as its second half, negated, and then its first half: the rotation of rotary position
embeddings (Su et al. 2021, RoFormer, in the form of GPT-NeoX).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from pipeline.ops.kinds import Kind
from pipeline.ops.rows import OpCall, floating, kind, signature


class Input(NamedTuple):
    """An operand of the call."""

    number: int

    def __str__(self) -> str:
        return f"i{self.number}"


class Computed(NamedTuple):
    """The result of an earlier instruction."""

    number: int

    def __str__(self) -> str:
        return f"v{self.number}"


Operand = Input | Computed | float


class Instruction(NamedTuple):
    """One of `INSTRUCTIONS` on its operands."""

    name: str
    operands: tuple[Operand, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.operands))})"


Program = tuple[Instruction, ...]

COMPARISONS: Final[Mapping[str, str]] = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
"""Name → sign."""

ROUNDINGS: Final = ("float16", "bfloat16")
"""They round to this dtype."""

INSTRUCTIONS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "maximum", "minimum", *COMPARISONS), 2),
    **dict.fromkeys(("neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "square", "sin", "cos"), 1),
    **dict.fromkeys(("erf", "tanh", "sigmoid", "relu", "silu", "gelu", "gelu_tanh", *ROUNDINGS), 1),
    "where": 3,
    **dict.fromkeys(("sum", "mean", "amax"), 1),
    "rotate": 1,
}
"""Name → number of operands. A comparison gives 0 or 1, and `where` takes what differs from 0 for true. `amax` of a row
with NaN is NaN on the CPU, and the maximum of the others on a GPU."""

REDUCTIONS: Final = frozenset({"sum", "mean", "amax"})
"""They give one element for each row."""

FORM: Final = re.compile(r"(\w+)\(([^()]*)\)")


def write_program(program: Sequence[Instruction]) -> str:
    """The text of a program."""
    return "; ".join(map(str, program))


def read_program(text: str) -> Program:
    """The program of a text that `write_program` made.

    Raises:
        ValueError: the text is no program; the message says at which instruction.
    """
    program: list[Instruction] = []
    for part in text.split("; "):
        found = FORM.fullmatch(part)
        if found is None or found[1] not in INSTRUCTIONS:
            raise ValueError(
                f"instruction {len(program)} is {part!r}; expected name(operands) of {', '.join(INSTRUCTIONS)}"
            )
        operands = tuple(_read_operand(word, len(program)) for word in found[2].split(", "))
        if len(operands) != INSTRUCTIONS[found[1]]:
            raise ValueError(
                f"instruction {len(program)} is {part!r}; {found[1]} has {INSTRUCTIONS[found[1]]} operands"
            )
        if found[1] == "rotate" and not isinstance(operands[0], Input):
            raise ValueError(f"instruction {len(program)} is {part!r}; only an operand of the call can be rotated")
        program.append(Instruction(found[1], operands))
    return tuple(program)


def _read_operand(word: str, earlier: int) -> Operand:
    if re.fullmatch(r"i\d+", word):
        return Input(int(word[1:]))
    if re.fullmatch(r"v\d+", word):
        if int(word[1:]) >= earlier:
            raise ValueError(f"instruction {earlier} reads {word}, which is not computed before")
        return Computed(int(word[1:]))
    return float(word)


def needs_whole_rows(program: Program) -> bool:
    """Whether some instruction reads more of a row than the element that it computes."""
    return any(instruction.name in REDUCTIONS or instruction.name == "rotate" for instruction in program)


def fits_its_operands(call: OpCall) -> str | None:
    """The text is a program over all operands, and the operands can be broadcast to the shape of the result."""
    try:
        program = read_program(call.attrs["program"])
    except ValueError as error:
        return str(error)
    inputs = {operand.number for part in program for operand in part.operands if isinstance(operand, Input)}
    if inputs != set(range(len(call.ins))):
        return f"the program reads the operands {sorted(inputs)}; the call has {len(call.ins)}"
    out = call.outs[0].shape
    for number, spec in enumerate(call.ins):
        padded = (1,) * (len(out) - spec.rank) + tuple(spec.shape)
        if len(padded) != len(out) or any(size not in (1, wanted) for size, wanted in zip(padded, out, strict=True)):
            return f"operand {number} is {list(spec.shape)}; expected what can be broadcast to {list(out)}"
    return _misplaced_rotation(program, call)


def _misplaced_rotation(program: Program, call: OpCall) -> str | None:
    """The result may take the storage of the first operand, so no row of that operand is read out of order."""
    rotated = {part.operands[0] for part in program if part.name == "rotate"}
    if Input(0) in rotated and call.ins[0].shape == call.outs[0].shape:
        return "the first operand is rotated; expected it at another position, since the result may be written over it"
    odd = [
        list(spec.shape)
        for number, spec in enumerate(call.ins)
        if Input(number) in rotated and spec.shape[-1] != call.outs[0].shape[-1]
    ]
    return f"rotated operands {odd}; expected rows as long as those of the result" if odd else None


KINDS = (kind(Kind.RowProgram, signature(floating, fits_its_operands, inputs=(1, None)), "program=s", inplace=(0,)),)
