"""Products by the kernels in C++, beside float64: with bias, activation, odd sizes, and operands with any strides."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.ops.fused import Activation
from pipeline.runtime.kernels.native.products import launch_any, pack_panels
from pipeline.runtime.kernels.weight_forms import FusedOperands

SIZES = st.sampled_from((1, 2, 3, 5, 14, 15, 16, 17, 31, 32, 33, 64, 113, 200))
DEPTHS = st.sampled_from((1, 2, 7, 16, 64, 511, 512, 513, 1024, 1100))


def tolerance(depth: int) -> float:
    """Each of `depth` additions rounds a sum of about √depth by 2^-24, and roundings add up like another √depth."""
    return 2**-23 * (depth + 16)


@settings(max_examples=60, deadline=None)
@given(SIZES, DEPTHS, SIZES, st.booleans(), st.booleans(), st.integers(0, 2**16))
def test_a_stored_matrix(library, rows, depth, columns, with_bias, with_other, seed):
    of = np.random.default_rng(seed)
    x, weight = (torch.from_numpy(of.standard_normal(shape, np.float32)) for shape in ((rows, depth), (columns, depth)))
    bias = torch.from_numpy(of.standard_normal(columns, np.float32)) if with_bias else None
    other = torch.from_numpy(of.standard_normal((rows, columns), np.float32)) if with_other else None
    out = torch.full((rows, columns), torch.nan)
    packed = pack_panels(library, 1, weight)
    assert packed is not None
    launch = packed.launch(FusedOperands(x, out, bias, other))
    assert launch is not None
    launch()
    wanted = x.double() @ weight.double().t()
    for further in (bias, other):
        wanted = wanted if further is None else wanted + further.double()
    torch.testing.assert_close(out.double(), wanted, atol=tolerance(depth), rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize("depth", [7, 512, 1100])
def test_what_is_added_may_be_the_memory_of_the_result(library, depth, rows):
    """Beyond 512 partial sums of several rows lie in the result too."""
    of = np.random.default_rng(depth)
    x, weight = (torch.from_numpy(of.standard_normal((size, depth), np.float32)) for size in (rows, 70))
    out = torch.from_numpy(of.standard_normal((rows, 70), np.float32))
    wanted = torch.relu(x.double() @ weight.double().t()) + out.double()
    packed = pack_panels(library, 1, weight)
    assert packed is not None
    launch = packed.launch(FusedOperands(x, out, other=out, after=Activation("relu")))
    assert launch is not None
    launch()
    torch.testing.assert_close(out.double(), wanted, atol=tolerance(depth), rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(SIZES, DEPTHS, SIZES, st.booleans(), st.booleans(), st.integers(0, 2**16))
def test_matrices_that_lie_anywhere(library, rows, depth, columns, turns_left, turns_right, seed):
    of = np.random.default_rng(seed)

    def matrix(height: int, width: int, turns: bool) -> torch.Tensor:
        made = torch.from_numpy(of.standard_normal((width, height) if turns else (height, width), np.float32))
        return made.t() if turns else made

    left, right = matrix(rows, depth, turns_left), matrix(depth, columns, turns_right)
    out = torch.full((rows, columns), torch.nan)
    launch = launch_any(library, left, right, None, out)
    assert launch is not None
    launch()
    torch.testing.assert_close(out.double(), left.double() @ right.double(), atol=tolerance(depth), rtol=1e-5)


ACTIVATIONS = {
    Activation("relu"): torch.relu,
    Activation("gelu"): torch.nn.functional.gelu,
    Activation("gelu_tanh"): lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    Activation("silu"): torch.nn.functional.silu,
    Activation("sigmoid"): torch.sigmoid,
    Activation("tanh"): torch.tanh,
    Activation("hardswish"): torch.nn.functional.hardswish,
    Activation("clip", numbers=(-0.5, 2.0)): lambda x: torch.clamp(x, -0.5, 2.0),
    Activation("leaky_relu", numbers=(0.1,)): lambda x: torch.nn.functional.leaky_relu(x, 0.1),
}


@pytest.mark.parametrize("after", ACTIVATIONS, ids=lambda after: after.name)
def test_activations(library, after):
    """Over all that they bend, far beyond it, and at NaN. A few roundings of numbers up to 1."""
    far = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 90.0, -90.0, 1e4, -1e4, 1e30, -1e30, torch.nan])
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.linspace(-0.01, 0.01, 101), far]).view(-1, 1)
    weight, out = torch.ones(1, 1), torch.empty(len(x), 1)
    packed = pack_panels(library, 1, weight)
    assert packed is not None
    launch = packed.launch(FusedOperands(x, out, after=after))
    assert launch is not None
    launch()
    wanted = ACTIVATIONS[after](x.double())
    torch.testing.assert_close(out.double(), wanted.float().double(), atol=1e-6, rtol=1e-6, equal_nan=True)
