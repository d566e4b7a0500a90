"""The text of row programs, and calls that are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InternalError
from pipeline.ir.graph import TensorSpec
from pipeline.ops.row_programs import INSTRUCTIONS, Computed, Input, Instruction, Program, read_program, write_program
from pipeline.ops.tables import KINDS

NUMBERS = st.floats(allow_nan=False)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    made: list[Instruction] = []
    for number in range(draw(st.integers(1, 8))):
        name = draw(st.sampled_from(sorted(INSTRUCTIONS)))
        inputs = st.integers(0, 12).map(Input)
        computed = st.integers(0, number - 1).map(Computed) if number else inputs
        operand = inputs if name == "rotate" else st.one_of(inputs, computed, NUMBERS)
        made.append(Instruction(name, tuple(draw(operand) for _ in range(INSTRUCTIONS[name]))))
    return tuple(made)


@given(programs())
def test_a_program_is_read_as_it_was_written(program: Program) -> None:
    assert read_program(write_program(program)) == program


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ("cbrt(i0)", [(2, 4)], r"instruction 0 is 'cbrt\(i0\)'; expected name\(operands\)"),
        ("add(i0)", [(2, 4)], r"add has 2 operands"),
        ("exp(v0)", [(2, 4)], "instruction 0 reads v0, which is not computed before"),
        ("exp(i0); rotate(v0)", [(2, 4)], "only an operand of the call can be rotated"),
        ("exp(x)", [(2, 4)], "could not convert"),
        ("add(i0, i2)", [(2, 4), (4,), (4,)], r"reads the operands \[0, 2\]; the call has 3"),
        ("add(i0, i1)", [(2, 4), (3, 4)], r"operand 1 is \[3, 4\]; expected what can be broadcast to \[2, 4\]"),
        ("add(i0, i1)", [(2, 4), (1, 2, 4)], r"operand 1 is \[1, 2, 4\]"),
        ("rotate(i0)", [(2, 4)], "the first operand is rotated"),
        ("rotate(i1); add(i0, v0)", [(2, 4), (2, 1)], r"rotated operands \[\[2, 1\]\]; expected rows as long"),
    ],
)
def test_a_call_that_no_kernel_could_run_is_refused(text: str, shapes: list[tuple[int, ...]], message: str) -> None:
    ins = [TensorSpec(shape, "float32") for shape in shapes]
    with pytest.raises(InternalError, match=message):
        KINDS["RowProgram"].emit({"program": text}, ins, [TensorSpec((2, 4), "float32")])
