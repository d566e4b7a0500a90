"""FusedOperands that end where memory ends: to read one number beyond them stops the process."""

from __future__ import annotations

import ctypes
import mmap
import sys

import pytest
import torch

from pipeline.ops import Kind
from pipeline.runtime.kernels.native import KERNELS
from pipeline.runtime.kernels.native.products import launch_any, launch_small, pack_panels
from pipeline.runtime.kernels.native.rows import launch_log_softmax, launch_row_sum, launch_threshold_gradient
from pipeline.runtime.kernels.weight_forms import FusedOperands
from tests.support.native import bind_native

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="protects a page by Linux's mprotect")

SIZES = (1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33)


def at_the_end(*sizes: int) -> torch.Tensor:
    """Random numbers whose last one is followed by a page that cannot be read or written."""
    made = torch.randn(sizes)
    room = -(-made.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, room + mmap.PAGESIZE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(first + room), mmap.PAGESIZE, 0) == 0
    placed = torch.frombuffer(pages, dtype=torch.float32, count=made.numel(), offset=room - made.nbytes)
    return placed.view(sizes).copy_(made)


@pytest.mark.parametrize("columns", SIZES)
@pytest.mark.parametrize("depth", SIZES)
def test_products(library, columns, depth):
    left, right, bias, out = (at_the_end(*sizes) for sizes in ((5, depth), (depth, columns), (columns,), (5, columns)))
    turned = at_the_end(columns, depth).t()
    for matrix in (right, turned):
        wanted = torch.addmm(bias, left, matrix)
        for launch in (
            launch_small(library, left, matrix, out, bias=bias),
            launch_any(library, left, matrix, bias, out),
        ):
            launch()
            torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)
        packed = pack_panels(library, 5, matrix.t())
        packed.launch(FusedOperands(left, out, bias, out.copy_(bias.expand(5, -1))))()
        torch.testing.assert_close(out, wanted + bias, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("columns", SIZES)
def test_rows(library, columns):
    x, scale, bias, out = (at_the_end(*sizes) for sizes in ((3, columns), (columns,), (columns,), (3, columns)))
    bind_native("aten.layer_norm.default", [x, scale, bias], [out], normalized_shape=(columns,), eps=1e-5)()
    torch.testing.assert_close(out, torch.layer_norm(x, (columns,), scale, bias), atol=1e-5, rtol=1e-4)
    bind_native("aten.softmax.int", [x], [out], dim=1)()
    torch.testing.assert_close(out, x.softmax(1), atol=1e-6, rtol=1e-5)
    bind_native("aten.gelu.default", [x], [out], approximate="none")()
    torch.testing.assert_close(out, torch.nn.functional.gelu(x), atol=1e-6, rtol=1e-5)
    launch_log_softmax(library, x, 1, out)()
    torch.testing.assert_close(out, x.log_softmax(1), atol=1e-6, rtol=1e-5)
    launch_threshold_gradient(library, x, x, 0, out)()
    assert torch.equal(out, x.relu())
    factors, sums = at_the_end(3), at_the_end(columns)
    launch_row_sum(library, x, factors, sums)()
    torch.testing.assert_close(sums, factors @ x, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("keys", SIZES)
@pytest.mark.parametrize("width", SIZES)
def test_attention(library, keys, width):
    query, key, value = at_the_end(1, 2, 3, width), at_the_end(1, 2, keys, width), at_the_end(1, 2, keys, width)
    mask, out, scores = at_the_end(1, 1, 3, keys), at_the_end(1, 3, 2, width), at_the_end(1, 2, 3, keys)
    attend = torch.nn.functional.scaled_dot_product_attention
    KERNELS[Kind.SmallAttention](library, [query, key, value], [out, scores], {"scale": 0.5})()
    torch.testing.assert_close(out, attend(query, key, value, scale=0.5).transpose(1, 2), atol=1e-4, rtol=1e-4)
    attrs = {"scale": 0.5, "mask": True, "causal": False, "backend": "auto"}
    KERNELS[Kind.ScaledDotProductAttention](library, [query, key, value, mask], [out], attrs)()
    torch.testing.assert_close(out, attend(query, key, value, mask, scale=0.5).transpose(1, 2), atol=1e-4, rtol=1e-4)
