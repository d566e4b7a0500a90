"""Row programs and Adam in Triton, run by Triton's interpreter on the CPU, next to their forms in torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeline.ops.row_programs import INSTRUCTIONS, Input, Program, read_program
from pipeline.runtime.feeding import SlotPointer
from pipeline.runtime.feeding import operands as operands_in
from pipeline.runtime.kernels.aten.indices import clamp_by_torch
from pipeline.runtime.kernels.base import Kernel, Launch
from pipeline.runtime.kernels.cuda import launch_adam, launch_clamp, launch_row_program
from pipeline.runtime.kernels.cuda.launches import space_of
from pipeline.runtime.kernels.cuda.source import RowSpace, Tile, join_axes, write_source
from pipeline.runtime.kernels.optimizer import adam, sgd
from pipeline.runtime.kernels.products import multiply_and_activate
from pipeline.runtime.kernels.row_programs import TORCH, compute_into, row_program

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
"""The interpreter computes by numpy, which warns of divisions in the elements of a tile after the end of a row."""

NEAR = {torch.float32: (1e-6, 4e-6), torch.float16: (1e-6, 2**-10), torch.bfloat16: (1e-6, 2**-7)}
"""dtype → atol and rtol: exponentials and sums in another order in float32, then at most one step of the dtype."""

POSITIVE = frozenset({"log", "sqrt", "rsqrt"})


def run_both(text: str, ins: Sequence[torch.Tensor], shape: Sequence[int], dtype: torch.dtype) -> None:
    program = read_program(text)
    by_triton, by_torch = torch.full(shape, math.nan, dtype=dtype), torch.full(shape, math.nan, dtype=dtype)
    launch_row_program(program, ins, by_triton)()
    compute_into(program, ins, by_torch)
    atol, rtol = NEAR[torch.bfloat16 if "bfloat16" in text else dtype]  # to which the interpreter cuts, and not rounds
    torch.testing.assert_close(by_triton, by_torch, atol=atol, rtol=rtol, equal_nan=True)
    assert not by_torch.isnan().all()


@pytest.mark.parametrize("name", sorted(INSTRUCTIONS))
def test_each_instruction(name: str) -> None:
    ins = [torch.randn(5, 6), torch.randn(5, 6), torch.randn(5, 6)]
    ins[1][0] = ins[0][0]  # comparisons of equal elements
    ins[2][1, 1] = math.nan
    ins = [operand.abs() for operand in ins] if name in POSITIVE else ins
    given = ins[: INSTRUCTIONS[name]] if name != "rotate" else ins[:1]
    run_both(f"{name}({', '.join(f'i{number}' for number in range(len(given)))})", given, (5, 6), torch.float32)


def test_each_instruction_has_both_forms() -> None:
    assert set(TORCH) == set(INSTRUCTIONS)


def test_what_is_not_a_number_stays_so() -> None:
    x = torch.tensor([[math.nan, -1.0, math.inf]])
    for text in ("relu(i0)", "maximum(i0, 0.0)", "minimum(i0, 0.0)", "add(i0, -inf)"):
        run_both(text, [x], (1, 3), torch.float32)


def test_small_numbers_and_zeros_keep_what_they_are() -> None:
    x = torch.tensor([[1e-8, -3e-5, 0.02, 0.31, -0.0, 0.0]])
    run_both("tanh(i0)", [x], (1, 6), torch.float32)
    run_both("tanh(i0); div(i0, v0)", [x[:, :4]], (1, 4), torch.float32)
    run_both("neg(i0); reciprocal(v0)", [x], (1, 6), torch.float32)


SOFTMAX = "mul(i0, 0.5); add(v0, i1); amax(v1); sub(v1, v2); exp(v3); sum(v4); div(v4, v5)"
NORM = "mean(i0); sub(i0, v0); square(v1); mean(v2); add(v3, 1e-05); rsqrt(v4); mul(v1, v5); mul(v6, i1); add(v7, i2)"
ROTARY = "mul(i1, i0); rotate(i1); mul(v1, i2); add(v0, v2)"


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("columns", [1, 7, 64, 130, 1025])
def test_rows_that_fill_no_block(columns: int, dtype: torch.dtype) -> None:
    rows = torch.randn(3, 5, columns).to(dtype)
    mask = torch.zeros(5, columns, dtype=dtype)
    mask[0, 1:] = -math.inf
    run_both(SOFTMAX, [rows, mask], rows.shape, dtype)
    run_both(NORM, [rows, torch.randn(columns).to(dtype), torch.randn(columns).to(dtype)], rows.shape, dtype)
    run_both("add(i0, i1); gelu(v0)", [rows, torch.randn(columns).to(dtype)], rows.shape, dtype)
    if columns % 2 == 0:
        run_both(ROTARY, [torch.rand(5, columns).to(dtype), rows, torch.rand(5, columns).to(dtype)], rows.shape, dtype)


def test_operands_with_any_strides() -> None:
    base = torch.randn(4, 6, 3, 10)
    turned, part, one = base.permute(2, 0, 1, 3), base[:3, :4, :, ::2], torch.randn(1)
    run_both("add(i0, i1); mul(v0, i2)", [turned, torch.randn(4, 1, 10), one], turned.shape, torch.float32)
    run_both(
        "sub(i0, i1); abs(v0); sum(v1); div(v0, v2)", [part, part.mean(-1, keepdim=True)], part.shape, torch.float32
    )
    run_both("where(i0, i1, 0.0)", [torch.rand(6, 5) > 0.5, torch.randn(6, 1)], (6, 5), torch.float32)


def test_a_softmax_of_what_is_not_a_number_is_none() -> None:
    """`amax` leaves it out on a GPU, and `sum` does not."""
    rows = torch.tensor([[1.0, math.nan, 2.0], [1.0, 2.0, 3.0]])
    run_both(SOFTMAX, [rows, torch.zeros(3)], (2, 3), torch.float32)


def test_the_text_of_a_kernel() -> None:
    """A small program as it is written: an operand that is broadcast along rows is read once for a tile."""
    ins, out = [torch.randn(4, 6), torch.randn(6)], torch.empty(4, 6)
    program = read_program("mul(i0, i1); amax(v0); sub(v0, v1)")
    space = space_of(program, ins, out)
    text = write_source(program, space, Tile.for_program(program, space))
    assert text.splitlines() == [
        "def row_program(p0, p1, result):",
        "    block = tl.program_id(0)",
        "    rows = block // 1 * 4 + tl.arange(0, 4)[:, None]",
        "    columns = block % 1 * 8 + tl.arange(0, 8)[None, :]",
        "    inside = (rows < 4) & (columns < 6)",
        "    a0 = rows",
        "    i0 = tl.load(p0 + a0 * 6 + columns * 1, (rows < 4) & (columns < 6), 0.0).to(tl.float32)",
        "    i1 = tl.load(p1 + columns * 1, (columns < 6), 0.0).to(tl.float32)",
        "    v0 = i0 * i1",
        "    v1 = tl.max(tl.where(inside, v0, float('-inf')), 1, keep_dims=True)",
        "    v2 = v0 - v1",
        "    tl.store(result + rows * 6 + columns, tl.where(inside, v2, 0.0).to(result.dtype.element_ty), inside)",
    ]


def test_far_offsets_are_counted_in_64_bits() -> None:
    program: Program = read_program("exp(i0)")
    near, far = (RowSpace((size, 4096), ((4096, 1),)) for size in (2**18, 2**19))
    assert "int64" not in write_source(program, near, Tile.for_program(program, near))
    assert "int64" in write_source(program, far, Tile.for_program(program, far))


@pytest.mark.parametrize("text", ["exp(i0)", "sum(i0)"])
def test_blocks_lie_along_the_one_axis_that_cuda_has_enough_of(text: str) -> None:
    """2^27 elements in one row for a chain, and in rows for a sum; along the second axis CUDA takes 65,535 blocks."""
    program = read_program(text)
    ins, out = [torch.empty(2**15, 4096, device="meta")], torch.empty(2**15, 4096, device="meta")
    space = space_of(program, ins, out)
    tile = Tile.for_program(program, space)
    assert tile.count_blocks(space) * tile.rows * tile.columns == 2**27
    assert "program_id(1)" not in write_source(program, space, tile)


def test_a_chain_over_several_blocks_of_a_row() -> None:
    x = torch.randn(3, 2 * 1024 + 5)
    run_both("exp(i0); add(v0, i1)", [x, torch.randn(2 * 1024 + 5)], x.shape, torch.float32)


@st.composite
def operands(draw: st.DrawFn) -> tuple[list[int], list[torch.Tensor]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    made = []
    for _ in range(draw(st.integers(1, 3))):
        rank = draw(st.integers(0, len(sizes)))
        shape = [draw(st.sampled_from([size, 1])) for size in sizes[len(sizes) - rank :]]
        order = draw(st.permutations(range(rank)))
        back = [order.index(axis) for axis in range(rank)]
        made.append(torch.arange(math.prod(shape) or 1).view([shape[axis] for axis in order]).permute(back))
    return sizes, made


@given(operands(), st.booleans())
def test_joined_axes_count_over_the_same_elements(case: tuple[list[int], list[torch.Tensor]], keeps_rows: bool) -> None:
    sizes, tensors = case
    space = join_axes(sizes, [tensor.expand(sizes).stride() for tensor in tensors], keeps_rows=keeps_rows)
    assert space.rows * space.columns == math.prod(sizes)
    assert not keeps_rows or space.columns == sizes[-1]
    for tensor, strides in zip(tensors, space.strides, strict=True):
        assert tensor.as_strided(space.sizes, strides).reshape(-1).equal(tensor.expand(sizes).reshape(-1))


def test_axes_that_lie_in_a_row_are_one() -> None:
    assert join_axes((2, 3, 4), [(12, 4, 1), (0, 0, 0)], keeps_rows=False).sizes == (24,)
    assert join_axes((2, 3, 4), [(12, 4, 1), (0, 4, 1)], keeps_rows=False).sizes == (2, 12)
    assert join_axes((2, 3, 4), [(12, 4, 1)], keeps_rows=True).sizes == (6, 4)


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_adam_over_all_parameters(decoupled: bool, largest: bool, maximize: bool) -> None:
    """Five updates next to torch's optimizer; the fourth one is skipped."""
    start = [torch.randn(shape) for shape in ((), (3,), (1500,), (33, 41))]
    peers = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    make = torch.optim.AdamW if decoupled else torch.optim.Adam
    peer = make(peers, lr=0.01, betas=(0.8, 0.99), weight_decay=0.1, amsgrad=largest, maximize=maximize)
    groups = [
        [tensor.clone() for tensor in start],
        *([torch.zeros_like(tensor) for tensor in start] for _ in range(2 + largest)),
    ]
    gradients = [torch.zeros_like(tensor) for tensor in start]
    step, skip, rate = torch.zeros(()), torch.zeros(()), torch.tensor(0.01, dtype=torch.float64)
    attrs = {"beta1": 0.8, "beta2": 0.99, "epsilon": 1e-8, "weight_decay": 0.1}
    launch = launch_adam(groups, gradients, step, rate, skip, {**attrs, "decoupled": decoupled, "maximize": maximize})
    assert launch is not None
    for number in range(5):
        skip.fill_(float(number == 3))
        step += 1 - skip
        for gradient, parameter in zip(gradients, peers, strict=True):
            gradient.copy_(torch.randn(gradient.shape))
            parameter.grad = gradient.clone()
        if number != 3:
            peer.step()
        launch()
    torch.testing.assert_close(groups[0], [parameter.detach() for parameter in peers], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_adam_in_half_precision(dtype: torch.dtype) -> None:
    """Next to torch's fused kernel, which computes in float32 too and rounds what it stores: two updates."""
    sizes = ((3,), (1500,), (33, 41))
    gradients = [torch.randn(size).to(dtype) for size in sizes]
    by_triton, by_torch = ([[torch.ones(size, dtype=dtype) for size in sizes]] for _ in range(2))
    for groups in (by_triton, by_torch):
        groups += [[torch.zeros(size, dtype=dtype) for size in sizes] for _ in range(2)]
    step, rate, skip = torch.zeros(()), torch.tensor(0.01, dtype=torch.float64), torch.zeros(())
    attrs = {"beta1": 0.8, "beta2": 0.99, "epsilon": 1e-6, "weight_decay": 0.1}
    launch = launch_adam(by_triton, gradients, step, rate, skip, {**attrs, "decoupled": True, "maximize": False})
    assert launch is not None
    settings = {"beta1": 0.8, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-6, "amsgrad": False, "maximize": False}
    for _ in range(2):
        step += 1
        launch()
        vars(torch)["_fused_adamw_"](
            by_torch[0], gradients, *by_torch[1:], [], [step] * len(sizes), lr=0.01, found_inf=skip, **settings
        )
    atol, rtol = NEAR[dtype]
    for found, expected in zip(by_triton, by_torch, strict=True):
        torch.testing.assert_close(found, expected, atol=atol, rtol=2 * rtol)


def test_adam_reads_gradients_where_a_run_has_pointed_them_at() -> None:
    """A run writes a large output of its caller into new memory, also where that is a gradient."""
    groups = [[torch.zeros(3)] for _ in range(3)]
    gradient, elsewhere = torch.zeros(3), torch.ones(3)
    step, rate, skip = torch.ones(()), torch.tensor(0.5, dtype=torch.float64), torch.zeros(())
    attrs = {"beta1": 0.9, "beta2": 0.99, "epsilon": 0.0, "weight_decay": 0, "decoupled": False, "maximize": False}
    launch = launch_adam(groups, [gradient], step, rate, skip, attrs)
    assert launch is not None
    pointer = SlotPointer(gradient.detach(), operands_of(launch))
    pointer.point_at(elsewhere)
    launch()
    torch.testing.assert_close(groups[0][0], torch.full((3,), -0.5))
    pointer.point_home()
    launch()
    torch.testing.assert_close(groups[1][0], torch.full((3,), 0.09))


@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_adam_corrects_moments_in_float64(beta1: float) -> None:
    """At the first update 1 - 0.99999 is 1.001e-05 in float32."""
    groups, gradient = [[torch.zeros(3)] for _ in range(3)], torch.ones(3)
    step, rate, skip = torch.ones(()), torch.tensor(0.5, dtype=torch.float64), torch.zeros(())
    attrs = {"beta1": beta1, "beta2": 0.99999, "epsilon": 0.0, "weight_decay": 0, "decoupled": False, "maximize": False}
    launch = launch_adam(groups, [gradient], step, rate, skip, attrs)
    assert launch is not None
    launch()
    torch.testing.assert_close(groups[0][0], torch.full((3,), -0.5), rtol=1e-5, atol=0)


def operands_of(launch: Launch) -> list[torch.Tensor]:
    """The tensors in it with three elements, each other than a moment or a parameter."""
    return [tensor for tensor in operands_in(launch) if tensor.shape == (3,)][1:2]


def test_adam_leaves_mixed_dtypes_to_torch() -> None:
    groups = [[torch.zeros(2), torch.zeros(2, dtype=torch.float16)] for _ in range(3)]
    attrs = {"beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8, "weight_decay": 0, "decoupled": False, "maximize": False}
    scalar = torch.zeros(())
    assert launch_adam(groups, groups[0], scalar, scalar, scalar, attrs) is None
    whole = [[torch.zeros(2, 3)] for _ in range(3)]
    assert launch_adam(whole, [torch.zeros(3, 2).T], scalar, scalar, scalar, attrs) is None, "as it does other strides"


@pytest.mark.parametrize("index", [torch.zeros(0).long(), torch.zeros(4).short(), torch.zeros(8).long()[::2]])
def test_the_check_leaves_other_indices_to_torch(index: torch.Tensor) -> None:
    assert launch_clamp(index, torch.empty_like(index), torch.zeros((), dtype=torch.bool), 0, 6, None) is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("ignored", [None, -100])
def test_indices_are_clamped_and_wrong_ones_noted(dtype: torch.dtype, ignored: int | None) -> None:
    """As torch's operators in turn do it, over more than one block; a flag stays set."""
    right = torch.arange(300, dtype=dtype) % 7
    for at, number in ((None, 0), (299, 7), (0, -1), (5, -100)):
        index, flag, by_torch = right.clone(), torch.zeros((), dtype=torch.bool), torch.zeros((), dtype=torch.bool)
        if at is not None:
            index[at] = number
        safe, expected = torch.full_like(index, 99), torch.full_like(index, 99)
        launch = launch_clamp(index, safe, flag, 0, 6, ignored)
        assert launch is not None
        launch()
        for part in clamp_by_torch(index, expected, by_torch, 0, 6, ignored):
            part()
        assert safe.equal(expected)
        assert flag.item() is by_torch.item() is (at is not None and number != ignored)
        launch_clamp(right, safe, flag, 0, 6, ignored)()  # type: ignore[misc]
        for part in clamp_by_torch(right, expected, by_torch, 0, 6, ignored):
            part()
        assert flag.item() is by_torch.item() is (at is not None and number != ignored)
    assert launch_clamp(right.view(3, 100).t(), safe, flag, 0, 6, ignored) is None


def test_a_product_with_its_activation_in_one_call() -> None:
    x, weight, bias, out = torch.randn(2, 3, 5), torch.randn(5, 4), torch.randn(4), torch.empty(2, 3, 4)
    launch = multiply_and_activate(x, weight, bias, out, "relu")
    assert launch is not None
    launch()
    torch.testing.assert_close(out, torch.relu(x @ weight + bias), atol=1e-6, rtol=1e-5)  # sums of five terms
    assert multiply_and_activate(x, weight, bias, out, "silu") is None
    assert multiply_and_activate(x.transpose(0, 1), weight, bias, torch.empty(3, 2, 4), "relu") is None
    assert multiply_and_activate(x, weight, bias, out, "gelu") is None, "the epilogue has only the one by tanh"


def test_programs_read_what_they_say() -> None:
    assert read_program(ROTARY)[1].operands == (Input(1),)


def test_an_empty_result_on_a_gpu_needs_no_launch() -> None:
    """CUDA refuses a launch of no blocks."""
    with FakeTensorMode():
        out = torch.empty(0, 4, device="cuda")
        launch = row_program([out], [out], {"program": "exp(i0)"})
    assert isinstance(launch, partial) and launch.func is compute_into


@pytest.mark.parametrize("update", [sgd, adam])
def test_an_update_leaves_operands_that_lie_elsewhere(update: Kernel) -> None:
    """The outputs are copies first, at each launch, and so is a gradient by columns."""
    count = 1 if update is sgd else 2
    params, gradient = torch.ones(2, 3), torch.arange(6.0).view(3, 2).T
    moments, (step, rate, skip) = (
        [torch.zeros(2, 3) for _ in range(count)],
        (torch.tensor(value) for value in (1.0, 0.5, 0.0)),
    )
    attrs: dict[str, Any] = {"count": 1, "weight_decay": 0.0, "momentum": 0.9, "nesterov": False, "maximize": False}
    attrs |= {"beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8, "decoupled": False}
    scalars = (rate, skip) if update is sgd else (step, rate, skip)

    def outputs(*begin: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in begin]

    apart, in_place = outputs(*map(torch.empty_like, (params, *moments))), outputs(params, *moments)
    launch = update([params, gradient, *moments, *scalars], apart, attrs)
    update([in_place[0], gradient.contiguous(), *in_place[1:], *scalars], in_place, attrs)()
    for _ in range(2):
        launch()
        torch.testing.assert_close(apart, in_place)
    assert params.eq(1).all() and not any(map(torch.count_nonzero, moments)) and not in_place[0].eq(1).all()
