"""Products of matrices that are read where they lie, beside float64: with bias, ReLU, or a gate, in odd sizes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.ops import Kind
from pipeline.runtime.kernels import KERNELS as BY_TORCH
from pipeline.runtime.kernels.native import KERNELS
from pipeline.runtime.kernels.native.products import LARGEST, launch_small

SIZES = st.sampled_from((1, 2, 3, 10, 14, 15, 16, 17, 31, 32, 33, 49, 64, 113))
DEPTHS = st.sampled_from((1, 2, 7, 15, 16, 17, 64, 100, 513))


def matrix(of: np.random.Generator, height: int, width: int, turns: bool) -> torch.Tensor:
    made = torch.from_numpy(of.standard_normal((width, height) if turns else (height, width), np.float32))
    return made.t() if turns else made


@settings(max_examples=80, deadline=None)
@given(
    SIZES,
    DEPTHS,
    SIZES,
    st.booleans(),
    st.booleans(),
    st.sampled_from(("", "bias", "relu", "gate")),
    st.integers(0, 99),
)
def test_products(library, rows, depth, columns, turns_left, turns_right, further, seed):
    """Each of `depth` additions rounds a sum of about √depth by 2^-24, and roundings add up like another √depth."""
    of = np.random.default_rng(seed)
    left, right = matrix(of, rows, depth, turns_left), matrix(of, depth, columns, turns_right)
    bias = matrix(of, 1, columns, False)[0] if further in ("bias", "relu") else None
    gate = matrix(of, rows, columns, False).relu() if further == "gate" else None
    out = torch.full((rows, columns), torch.nan)
    launch = launch_small(library, left, right, out, bias=bias, relu=further == "relu", gate=gate)
    assert launch is not None
    launch()
    wanted = left.double() @ right.double()
    if bias is not None:
        wanted = wanted + bias.double()
    if further == "relu":
        wanted = wanted.relu()
    if gate is not None:
        wanted = wanted * (gate > 0)
    torch.testing.assert_close(out.double(), wanted, atol=2**-23 * (depth + 16), rtol=1e-5)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("relu", [False, True])
def test_nan_and_infinity_go_through(library, number, relu):
    left, right, bias, out = torch.randn(15, 17), torch.randn(17, 40), torch.randn(40), torch.empty(15, 40)
    left[3, 5] = number
    right[9, 33] = number
    launch = launch_small(library, left, right, out, bias=bias, relu=relu)
    assert launch is not None
    launch()
    wanted = left @ right + bias
    torch.testing.assert_close(out, wanted.relu() if relu else wanted, equal_nan=True, atol=1e-5, rtol=1e-5)


def test_a_gate_stops_nan_as_torch_does(library):
    left, right, out = torch.full((3, 2), torch.nan), torch.ones(2, 4), torch.empty(3, 4)
    gate = torch.tensor([[0.0, 1.0, 2.0, torch.nan]] * 3)
    launch = launch_small(library, left, right, out, gate=gate)
    assert launch is not None
    launch()
    wanted = torch.ops.aten.threshold_backward(left @ right, gate, 0)
    assert out.isnan().tolist() == wanted.isnan().tolist() == [[False, True, True, True]] * 3


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", [False, True])
def test_a_product_with_relu_is_that_of_torch(library, bias, gate):
    """By both kernels of the kind; a float of about 5, after 30 additions."""
    operands = [torch.randn(9, 30), torch.randn(30, 20), *[torch.randn(20)] * bias, *[torch.randn(9, 20).relu()] * gate]
    outs, attrs = [torch.empty(9, 20) for _ in range(2)], {"bias": bias, "gate": gate}
    launch = KERNELS[Kind.ReluProduct](library, operands, outs[:1], attrs)
    assert launch is not None
    launch()
    BY_TORCH[Kind.ReluProduct](operands, outs[1:], attrs)()
    wanted = operands[0].double() @ operands[1].double() + (operands[2].double() if bias else 0)
    wanted = torch.where(operands[-1] > 0, wanted, 0) if gate else wanted.relu()
    for out in outs:
        torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("left", "right", "out"),
    [
        (torch.ones(2, 3, dtype=torch.float64), torch.ones(3, 4, dtype=torch.float64), torch.ones(2, 4).double()),
        (torch.ones(2, 3), torch.ones(6, 8)[::2, ::2], torch.ones(2, 4)),
        (torch.ones(2, 3), torch.ones(3, 4), torch.ones(4, 2).t()),
        (torch.ones(1, 1), torch.ones(1, LARGEST + 1), torch.ones(1, LARGEST + 1)),
        (torch.ones(2, 0), torch.ones(0, 4), torch.ones(2, 4)),
    ],
    ids=["float64", "gaps between columns", "a result that lies by columns", "a large matrix", "no numbers"],
)
def test_what_is_left_to_others(library, left, right, out):
    assert launch_small(library, left, right, out) is None
