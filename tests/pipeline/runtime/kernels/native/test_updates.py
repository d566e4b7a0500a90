"""Adam in C++ beside torch's fused Adam, and the scalars of a step."""

import itertools

import pytest
import torch

from pipeline.ops import Kind
from pipeline.runtime.kernels.base import kernels_for_threads
from pipeline.runtime.kernels.native.rows import (
    launch_class_loss,
    launch_class_loss_gradient,
    launch_log_softmax,
    launch_log_softmax_gradient,
    launch_row_sum,
    launch_threshold_gradient,
)
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


# The loss of a classifier, its gradient, gradients of ReLU and sums of rows, beside torch.

aten = torch.ops.aten

SHAPES = [(1, 1), (3, 10), (8, 16), (5, 17), (64, 50), (2, 1000)]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_log_softmax_and_its_gradient(library, shape, scale):
    """Beside float64: a logarithm rounds by 2^-24 of its size, and so does a sum of shares."""
    x, gradient, out = normal(*shape) * scale, normal(*shape), torch.empty(shape)
    launch_log_softmax(library, x, 1, out)()
    torch.testing.assert_close(out.double(), x.double().log_softmax(1), atol=2e-6, rtol=1e-6)
    found = torch.empty(shape)
    launch_log_softmax_gradient(library, gradient, out, 1, found)()
    wanted = aten._log_softmax_backward_data(gradient.double(), out.double(), 1, torch.float64)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
    launch_log_softmax(library, x, 1, x)()
    assert torch.equal(x, out), "a plan may write it over its operand"


def test_log_softmax_of_rows_that_are_not_finite(library):
    """All of a row is -inf, some of it NaN or inf, or some of it -inf."""
    x = normal(5, 20)
    x[0], x[1, 19], x[2, 3], x[3, 7] = -torch.inf, torch.nan, torch.inf, -torch.inf
    out = torch.empty_like(x)
    launch_log_softmax(library, x, -1, out)()
    torch.testing.assert_close(out, x.log_softmax(1), equal_nan=True, atol=1e-6, rtol=1e-6)
    assert out.isnan().any(1).tolist() == [True, True, True, False, False]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
def test_class_loss_and_its_gradient(library, shape, reduction, ignored):
    rows, classes = shape
    x, labels = normal(*shape), torch.arange(rows) * 7 % classes
    labels[:: 2 if ignored == "some" else 1] *= 1 if ignored == "none" else 0
    skipped = 0 if ignored != "none" else -100
    wanted, total = aten.nll_loss_forward(x, labels, None, reduction, skipped)
    outs = [torch.full_like(wanted, 9), torch.full_like(total, 9)]
    launch_class_loss(library, x, labels, reduction, skipped, outs)()
    torch.testing.assert_close(outs[0], wanted, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert outs[1] == total
    gradient, found = normal(*wanted.shape), torch.full(shape, 9.0)
    launch_class_loss_gradient(library, gradient, labels, total, reduction, skipped, found)()
    assert torch.equal(found, aten.nll_loss_backward(gradient, x, labels, None, reduction, skipped, total))


@pytest.mark.parametrize("label", [10, -1])
def test_a_label_that_is_no_class_is_named(library, label):
    x, labels = normal(3, 10), torch.tensor([1, label, 2])
    outs = [torch.empty(()), torch.empty(())]
    with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
        launch_class_loss(library, x, labels, 1, -100, outs)()


@pytest.mark.parametrize("shape", [(1,), (16,), (3, 5, 7), (2, 8, 4, 4)])
@pytest.mark.parametrize("threshold", [0, 0.5])
def test_threshold_gradient(library, shape, threshold):
    gradient, x, out = normal(*shape), normal(*shape, 1)[..., 0].contiguous(), torch.full(shape, 9.0)
    x.view(-1)[0], gradient.view(-1)[-1] = torch.nan, torch.inf
    launch_threshold_gradient(library, gradient, x, threshold, out)()
    torch.testing.assert_close(out, aten.threshold_backward(gradient, x, threshold), rtol=0, atol=0, equal_nan=True)


def test_threshold_gradient_by_channels(library):
    by_channel = [normal(2, 8, 4, 4).to(memory_format=torch.channels_last) for _ in range(3)]
    gradient, x, out = by_channel[0], -by_channel[1], by_channel[2]
    launch_threshold_gradient(library, gradient, x, 0, out)()
    assert torch.equal(out, aten.threshold_backward(gradient, x, 0))
    assert launch_threshold_gradient(library, gradient.contiguous(), x, 0, out) is None


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("columns", [1, 10, 16, 100, 128, 300])
def test_row_sums(library, rows, columns):
    """Each addition rounds a sum of about √rows by 2^-24."""
    x, factors, out = normal(rows, columns), normal(rows), torch.empty(columns)
    launch_row_sum(library, x, factors, out)()
    torch.testing.assert_close(out.double(), x.double().t() @ factors.double(), atol=2**-23 * (rows + 8), rtol=1e-5)
    launch_row_sum(library, normal(rows, 2 * columns)[:, :columns], factors, out)()
    torch.testing.assert_close(out, normal(rows, 2 * columns)[:, :columns].t() @ factors, atol=1e-5, rtol=1e-5)


def test_what_is_left_to_torch(library):
    x, labels, out = normal(4, 6), torch.arange(4), torch.empty(4, 6)
    loss = [torch.empty(()), torch.empty(())]
    assert launch_log_softmax(library, x, 0, out) is None
    assert launch_log_softmax(library, x.double(), 1, out.double()) is None
    assert launch_log_softmax_gradient(library, x, x.t().contiguous().t(), 1, out) is None
    assert launch_class_loss(library, x, labels.int(), 1, -100, loss) is None
    assert launch_class_loss(library, x.t(), torch.arange(6), 1, -100, loss) is None
    assert launch_class_loss(library, x, normal(8).long()[::2], 1, -100, loss) is None
    assert launch_row_sum(library, x.t(), torch.ones(6), torch.empty(4)) is None


@pytest.mark.parametrize(("threads", "rows", "taken"), [(1, 2048, True), (2, 2048, False), (2, 2047, True)])
def test_threads_of_torch_share_what_is_large(library, threads, rows, taken):
    """From 2^15 numbers on, where the program was compiled for several."""
    x, out = torch.zeros(rows, 16), torch.zeros(rows, 16)
    with kernels_for_threads(threads):
        launches = (
            launch_log_softmax(library, x, 1, out),
            launch_log_softmax_gradient(library, x, x, 1, out),
            launch_threshold_gradient(library, x, x, 0, out),
            launch_row_sum(library, x, torch.ones(rows), torch.zeros(16)),
        )
    assert {launch is not None for launch in launches} == {taken}
