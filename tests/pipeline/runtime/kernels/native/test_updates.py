"""Adam in C++ beside torch's fused Adam, and the scalars of a step."""

import itertools

import pytest
import torch

from pipeline.ops import Kind
from pipeline.runtime.kernels.base import kernels_for_threads
from pipeline.runtime.kernels.optimizer import KERNELS as BY_TORCH
from pipeline.runtime.kernels.optimizer import NATIVE as KERNELS

SIZES = [(1,), (16,), (17,), (3, 5, 7), (33, 32)]

DIGITS = {"rtol": 2**-21, "atol": 2**-22}
"""Four roundings: the root and the bias correction are multiplied in another order, and sums are fused. Operands are up
to 4, and where terms of a sum cancel each other, their roundings stay."""


def attrs(**changed: object) -> dict[str, object]:
    usual = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.0, "decoupled": False, "maximize": False}
    return {"count": len(SIZES), **usual, **changed}


def operands(groups: int) -> list[torch.Tensor]:
    """Parameters, gradients and moments; those after the second group are not negative."""
    draw = torch.Generator().manual_seed(0)
    made = [[torch.randn(size, generator=draw) for size in SIZES] for _ in range(groups)]
    return [tensor.abs() if at > 2 else tensor for at, group in enumerate(made) for tensor in group]


def scalars(step: float = 3, rate: float = 1e-2, skip: float = 0) -> list[torch.Tensor]:
    return [torch.tensor(float(step)), torch.tensor(rate, dtype=torch.float64), torch.tensor(float(skip))]


def run_both(library, ins, settings):
    count = len(SIZES)
    results = []
    for kernel in (lambda *args: KERNELS[Kind.Adam](library, *args), BY_TORCH[Kind.Adam]):
        outs = [tensor.clone() for tensor in (*ins[:count], *ins[2 * count : -3])]
        placed = [*outs[:count], *ins[count : 2 * count], *outs[count:], *ins[-3:]]
        launch = kernel(placed, outs, settings)
        assert launch is not None
        launch()
        results.append(outs)
    return zip(*results, strict=True)


OPTIONS = [
    dict(zip(("decoupled", "weight_decay", "maximize"), chosen, strict=True))
    for chosen in itertools.product((False, True), (0.0, 0.1), (False, True))
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("groups", [4, 5], ids=["Adam", "AMSGrad"])
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_adam_is_that_of_torch(library, options, groups, step):
    for own, wanted in run_both(library, [*operands(groups), *scalars(step)], attrs(**options)):
        torch.testing.assert_close(own, wanted, **DIGITS)


def test_a_skipped_step_changes_nothing(library):
    ins = [*operands(4), *scalars(skip=1)]
    ins[7][0] = torch.nan  # a gradient
    count = len(SIZES)
    for (own, _), old in zip(run_both(library, ins, attrs()), [*ins[:count], *ins[2 * count : -3]], strict=True):
        assert torch.equal(own, old)


@pytest.mark.parametrize("epsilon", [1e-8, 0.0])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, 1e30, 1e-30, 0.0])
def test_numbers_that_are_not_finite_or_tiny(library, epsilon, number):
    """Also moments of 0, whose root is 0, and second moments that overflow."""
    ins = [*operands(4), *scalars()]
    count = len(SIZES)
    for at in range(count):
        ins[count + at].view(-1)[::2] = number
        ins[2 * count + at].view(-1)[:4] = 0
        ins[3 * count + at].view(-1)[:4] = 0
    for own, wanted in run_both(library, ins, attrs(epsilon=epsilon)):
        torch.testing.assert_close(own, wanted, equal_nan=True, **DIGITS)


def test_results_beside_their_operands_and_gradients_by_columns(library):
    param, first, second = (torch.rand(4, 6) for _ in range(3))
    gradient = torch.randn(6, 4).t()
    ins = [param, gradient, first, second, *scalars()]
    outs, wanted = ([torch.empty(4, 6) for _ in range(3)] for _ in range(2))
    before = [tensor.clone() for tensor in ins]
    KERNELS[Kind.Adam](library, ins, outs, attrs(count=1))()
    BY_TORCH[Kind.Adam](ins, wanted, attrs(count=1))()
    for own, other in zip(outs, wanted, strict=True):
        torch.testing.assert_close(own, other, **DIGITS)
    assert all(torch.equal(tensor, old) for tensor, old in zip(ins, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_left_to_torch(library, dtype):
    ins = [tensor.to(dtype) for tensor in operands(4)]
    outs = [*ins[: len(SIZES)], *ins[2 * len(SIZES) :]]
    assert KERNELS[Kind.Adam](library, [*ins, *scalars()], outs, attrs()) is None


@pytest.mark.parametrize(("number", "skip"), [(0.0, 0), (-3e38, 0), (torch.nan, 1), (torch.inf, 1), (-torch.inf, 1)])
def test_a_number_that_is_not_finite_is_not_counted(library, number, skip):
    found, count = torch.tensor(9.0), torch.tensor(9.0)
    KERNELS[Kind.NotFinite](library, [torch.tensor(number)], [found], {})()
    KERNELS[Kind.CountStep](library, [torch.tensor(4.0), found], [count], {})()
    assert (found.item(), count.item()) == (skip, 5 - skip)


@pytest.mark.parametrize(("threads", "taken"), [(1, True), (2, False)])
def test_threads_of_torch_share_a_large_parameter(library, threads, taken):
    """One of 2^15 numbers is enough, since all parameters are one call of torch."""
    ins = [torch.zeros(size) for _ in range(4) for size in ((8,), (2**15,))] + scalars()
    outs = [*ins[:2], *ins[4:8]]
    with kernels_for_threads(threads):
        launch = KERNELS[Kind.Adam](library, ins, outs, {**attrs(), "count": 2})
    assert (launch is not None) == taken
