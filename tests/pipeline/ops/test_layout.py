"""Layout rules against torch's own views: the same sizes, strides and offset."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InternalError
from pipeline.ir.graph import TensorSpec
from pipeline.ops import KINDS, Layout
from pipeline.ops.row_programs import INSTRUCTIONS, Computed, Input, Instruction, Program, read_program, write_program

SIZES = st.lists(st.sampled_from([0, 1, 2, 3, 4]), max_size=4).map(tuple)


def of(tensor: torch.Tensor) -> Layout:
    return Layout(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, Layout]:
    """A tensor after some views, and the layout that our rules give for them."""
    tensor = torch.empty(draw(SIZES))
    layout = Layout.contiguous(tuple(tensor.shape))
    for _ in range(draw(st.integers(0, 4))):
        tensor, layout = _one(draw, tensor, layout)
    return tensor, layout


def _one(draw: st.DrawFn, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
    rank = tensor.dim()
    axis = draw(st.integers(0, max(rank - 1, 0)))
    size = tensor.shape[axis] if rank else 0
    match draw(st.sampled_from(["permute", "slice", "select", "squeeze", "expand", "diagonal", "unfold"])):
        case "permute":
            perm = draw(st.permutations(range(rank)))
            return tensor.permute(perm), layout.permute(perm)
        case "slice" if size:
            start, step = draw(st.integers(0, size - 1)), draw(st.integers(1, 3))
            end = draw(st.integers(start, size))
            sliced = tensor.movedim(axis, 0)[start:end:step].movedim(0, axis)
            return sliced, layout.slice_axis(axis, start, len(range(start, end, step)), step)
        case "select" if size:
            index = draw(st.integers(0, size - 1))
            return tensor.select(axis, index), layout.select(axis, index)
        case "squeeze" if size == 1:
            return tensor.squeeze(axis), layout.squeeze(axis)
        case "expand":
            sizes = [draw(st.integers(0, 3)) if size == 1 else size for size in tensor.shape]
            sizes = [*draw(st.lists(st.integers(0, 3), max_size=max(5 - rank, 0))), *sizes]
            return tensor.expand(sizes), layout.expand(sizes)
        case "diagonal" if rank >= 2:
            first, second = draw(st.sampled_from(list(permutations(range(rank), 2))))
            distance = draw(st.integers(-3, 3))
            return tensor.diagonal(distance, first, second), layout.diagonal(distance, first, second)
        case "unfold" if size and rank < 5:
            window, step = draw(st.integers(0, size)), draw(st.integers(1, 3))
            return tensor.unfold(axis, window, step), layout.unfold(axis, window, step)
        case _:
            return tensor, layout


@given(views())
def test_every_rule_is_torchs(view: tuple[torch.Tensor, Layout]) -> None:
    tensor, layout = view
    assert layout == of(tensor)
    assert (layout.numel, layout.is_contiguous) == (tensor.numel(), tensor.is_contiguous())


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A view, and sizes of as many elements: its own with axes split, merged and of size 1 put between."""
    tensor, _ = draw(views())
    if not tensor.numel():
        return tensor, draw(st.permutations([0, *draw(SIZES)]).map(tuple))
    factors = [factor for size in tensor.shape for factor in {4: (2, 2)}.get(size, (size,))]
    if draw(st.booleans()):
        factors = draw(st.permutations(factors))
    sizes: list[int] = [1]
    for factor in factors:
        if draw(st.booleans()):
            sizes[-1] *= factor
        else:
            sizes += [factor] if draw(st.booleans()) else [1, factor]
    return tensor, tuple(sizes)


@given(reshapes())
def test_a_reshape_is_a_view_exactly_where_torch_can_view(case: tuple[torch.Tensor, tuple[int, ...]]) -> None:
    tensor, sizes = case
    assert math.prod(sizes) == tensor.numel()
    try:
        expected = of(tensor.view(sizes))
    except RuntimeError:
        expected = None
    assert of(tensor).reshape(sizes) == expected


@pytest.mark.parametrize(
    ("layout", "sizes", "expected"),
    [
        (Layout.contiguous((2, 3, 4)).permute((0, 2, 1)), (2, 2, 2, 3), Layout((2, 2, 2, 3), (12, 2, 1, 4))),
        (Layout.contiguous((2, 3, 4)).permute((1, 0, 2)), (3, 8), None),
        (Layout.contiguous((4, 6)).slice_axis(1, 2, 3), (2, 2, 3), Layout((2, 2, 3), (12, 6, 1), 2)),
        (Layout.contiguous((4, 6)).slice_axis(1, 2, 3), (12,), None),
        (Layout.contiguous((1, 3)).expand((4, 3)), (2, 2, 3), Layout((2, 2, 3), (0, 0, 1))),
    ],
)
def test_pictures(layout: Layout, sizes: tuple[int, ...], expected: Layout | None) -> None:
    assert layout.reshape(sizes) == expected


# The text of row programs, and calls that are refused.

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
