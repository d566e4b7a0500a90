"""Activations by the kernels in C++, beside float64: all sizes of the rest, in place, and what torch keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from pipeline.runtime.kernels.base import Launch, kernels_for_threads
from tests.support.native import bind_native

ATOL, RTOL = 1e-6, 1e-6
"""float32: a few roundings of numbers up to 1, and relative to larger ones."""

FUNCTIONS: dict[tuple[str, str], Any] = {
    ("relu", ""): torch.relu,
    ("gelu", "none"): functional.gelu,
    ("gelu", "tanh"): lambda x: functional.gelu(x, approximate="tanh"),
    ("silu", ""): functional.silu,
    ("sigmoid", ""): torch.sigmoid,
    ("tanh", ""): torch.tanh,
    ("hardswish", ""): functional.hardswish,
}


def bind(name: str, x: torch.Tensor, out: torch.Tensor, approximate: str = "") -> Launch | None:
    given = {"approximate": approximate} if approximate else {}
    return bind_native(f"aten.{name}.default", [x], [out], **given)


@pytest.mark.parametrize(("name", "approximate"), FUNCTIONS)
@pytest.mark.parametrize("count", [1, 4, 15, 16, 17, 63, 64, 65, 1000])
def test_every_activation(name: str, approximate: str, count: int) -> None:
    x = torch.linspace(-9, 9, count)
    out = torch.full((count + 1,), torch.nan)
    launch = bind(name, x, out[:count], approximate)
    assert launch is not None
    launch()
    wanted = FUNCTIONS[name, approximate](x.double())
    torch.testing.assert_close(out[:count].double(), wanted, atol=ATOL, rtol=RTOL)
    assert out[count].isnan()  # nothing past the result is written
    launch = bind(name, x, x, approximate)
    assert launch is not None
    launch()
    assert torch.equal(x, out[:count])


def test_other_operands_are_left_to_torch() -> None:
    x = torch.ones(4, 6)
    for operand in (x.double(), x.half(), x.int(), x.t(), x[:, :3], x[:0]):
        assert bind("relu", operand, torch.empty(operand.shape, dtype=operand.dtype)) is None


def test_with_several_threads_torch_keeps_what_it_shares_among_them() -> None:
    large, small = torch.ones(2**15), torch.ones(2**15 - 1)
    with kernels_for_threads(2):
        assert bind("relu", large, large) is None
        assert bind("relu", small, small) is not None
        assert bind_native("aten.softmax.int", [large.view(8, -1)], [large.view(8, -1)], dim=1) is None
    with kernels_for_threads(1):
        assert bind("relu", large, large) is not None
