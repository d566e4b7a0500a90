"""Activations by the kernels in C++, beside float64: all sizes of the rest, in place, and what torch keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import functional

from pipeline.ops import Kind
from pipeline.runtime.kernels.native import KERNELS
from tests.support.native import native_library

ATOL, RTOL = 1e-6, 1e-6
"""float32: a few roundings of numbers up to 1, and relative to larger ones."""

FUNCTIONS: dict[tuple[Kind, str], Any] = {
    (Kind.Relu, ""): torch.relu,
    (Kind.Gelu, "none"): functional.gelu,
    (Kind.Gelu, "tanh"): lambda x: functional.gelu(x, approximate="tanh"),
    (Kind.Silu, ""): functional.silu,
    (Kind.Sigmoid, ""): torch.sigmoid,
    (Kind.Tanh, ""): torch.tanh,
    (Kind.HardSwish, ""): functional.hardswish,
}


def attrs_of(approximate: str) -> dict[str, Any]:
    return {"approximate": approximate} if approximate else {}


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("kind", "approximate"), FUNCTIONS, ids=lambda part: getattr(part, "name", part))
@pytest.mark.parametrize("count", [1, 4, 15, 16, 17, 63, 64, 65, 1000])
def test_every_activation(kind: Kind, approximate: str, count: int) -> None:
    x = torch.linspace(-9, 9, count)
    out = torch.full((count + 1,), torch.nan)
    launch = KERNELS[kind](native_library(), [x], [out[:count]], attrs_of(approximate))
    assert launch is not None
    launch()
    wanted = FUNCTIONS[kind, approximate](x.double())
    torch.testing.assert_close(out[:count].double(), wanted, atol=ATOL, rtol=RTOL)
    assert out[count].isnan()  # nothing behind the result is written
    launch = KERNELS[kind](native_library(), [x], [x], attrs_of(approximate))
    assert launch is not None
    launch()
    assert torch.equal(x, out[:count])


def test_other_operands_are_left_to_torch() -> None:
    library, x = native_library(), torch.ones(4, 6)
    for operand in (x.double(), x.half(), x.int(), x.t(), x[:, :3], x[:0]):
        assert KERNELS[Kind.Relu](library, [operand], [torch.empty(operand.shape, dtype=operand.dtype)], {}) is None


def test_with_several_threads_torch_keeps_what_it_shares_among_them() -> None:
    library, large, small = native_library(), torch.ones(2**15), torch.ones(2**15 - 1)
    with threads(2):
        assert KERNELS[Kind.Relu](library, [large], [large], {}) is None
        assert KERNELS[Kind.Relu](library, [small], [small], {}) is not None
        assert KERNELS[Kind.Softmax](library, [large.view(8, -1)], [large.view(8, -1)], {"axis": 1}) is None
    with threads(1):
        assert KERNELS[Kind.Relu](library, [large], [large], {}) is not None
