"""Products in blocks by numpy's small kernels: which weights get blocks, and what the products compute."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional

from pipeline.ir.graph import TensorSpec
from pipeline.ops import GraphBuilder
from pipeline.ops.fused import Activation
from pipeline.runtime import compile_graph
from pipeline.runtime.kernels.blocked import (
    HAS_SMALL_KERNELS,
    BlockedWeight,
    HeldArrays,
    launch_batch,
    pack_blocks,
    split_into_blocks,
)
from pipeline.runtime.kernels.weight_forms import FusedOperands
from tests.support.torch_programs import compile_module

ATOL, RTOL = 1e-4, 2e-5
"""float32: sums of up to 128 products of numbers near 1, in orders of their own."""

needs_small_kernels = pytest.mark.skipif(not HAS_SMALL_KERNELS, reason="numpy has no small kernels for this processor")


@pytest.fixture
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@needs_small_kernels
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("rows", "columns", "inner", "blocks"),
    [
        (32, 512, 128, (8, 64, 32)),  # 64 columns, all rows at once
        (32, 128, 512, (2, 64, 16)),  # a group of 32 rows would be more than a million multiplications
        (128, 768, 768, (12, 64, 16)),
        (2, 256, 64, (4, 64, 2)),
        (1, 256, 64, None),  # a token: torch reads the weight once, in its own order
        (8, 48, 64, (3, 16, 8)),  # of the widths only 16 divides 48
        (8, 40, 64, None),
        (2, 16, 32, None),  # fewer multiplications than a call is worth
        (16, 64, 2048, None),  # groups of 7 rows
        (67, 512, 1024, None),  # 67 is prime, and too many rows at once
        (2**13, 256, 1024, None),  # oneDNN is faster
    ],
)
def test_blocks_are_as_wide_and_groups_as_large_as_small_kernels_take(
    rows: int, columns: int, inner: int, blocks: tuple[int, int, int] | None
) -> None:
    packed = pack_blocks(rows, torch.zeros(columns, inner))
    found = None if packed is None else (packed.blocks.shape[0], packed.blocks.shape[2], packed.rows)
    assert found == blocks
    assert packed is None or packed.nbytes == columns * inner * 4


@pytest.mark.usefixtures("one_thread")
def test_several_threads_of_torch_share_a_product_instead() -> None:
    torch.set_num_threads(2)
    assert pack_blocks(32, torch.zeros(512, 128)) is None


@pytest.mark.parametrize("bias", [None, torch.randn(64), torch.randn(128)[::2]])
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "gelu_tanh", "clip"])
def test_a_product_its_bias_and_its_activation(bias: torch.Tensor | None, activation: str) -> None:
    weight, x, out = torch.randn(64, 48), torch.randn(2, 12, 48), torch.empty(2, 12, 64)
    numbers = (-0.5, 1.5) if activation == "clip" else ()
    of = FusedOperands(x, out, bias, after=Activation(activation, numbers))
    launch = split_into_blocks(weight, 16, 8).launch(of)
    assert launch is not None
    launch()
    expected = functional.linear(x, weight, bias)
    after = {
        "relu": torch.relu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda y: functional.gelu(y, approximate="tanh"),
        "clip": lambda y: y.clamp(-0.5, 1.5),
    }
    torch.testing.assert_close(out, after.get(activation, lambda y: y)(expected), atol=ATOL, rtol=RTOL)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(48, 12).t(),  # columns lie side by side
        torch.randn(1, 48).expand(12, 48),
        torch.randn(3, 2, 48).transpose(0, 1)[:, ::2].transpose(0, 1),  # no rows with one stride
        torch.randn(9, 48),  # a row is left over
    ],
)
def test_operands_that_blas_cannot_read_are_left_to_torch(x: torch.Tensor) -> None:
    packed: BlockedWeight = split_into_blocks(torch.randn(64, 48), 16, 4)
    assert packed.launch(FusedOperands(x, torch.empty(*x.shape[:-1], 64))) is None


def test_a_product_follows_tensors_that_are_pointed_at_other_memory() -> None:
    """As a context does with large inputs and outputs; the old memory is neither read nor written."""
    weight = torch.randn(32, 16)
    (x, new_x), (out, new_out) = torch.randn(2, 8, 16), torch.zeros(2, 8, 32)
    x, out = x.clone(), out.clone()
    rows, result = x.view(8, 16), out.view(8, 32)
    launch = split_into_blocks(weight, 16, 8).launch(FusedOperands(rows, result))
    assert launch is not None
    launch()
    results, groups = launch.args[:2]  # type: ignore[attr-defined]
    for tensor, other in ((groups, new_x), (results, new_out)):
        tensor.set_(other.untyped_storage(), other.storage_offset(), tensor.size(), tensor.stride())
    before = out.clone()
    launch()
    torch.testing.assert_close(new_out, new_x @ weight.t(), atol=ATOL, rtol=RTOL)
    assert torch.equal(out, before)


def test_arrays_are_made_once_for_the_same_memory() -> None:
    held, x = HeldArrays(), torch.ones(2)
    assert held.arrays_of(x)[0] is held.arrays_of(x)[0]


def test_a_batch_of_products_into_a_result_with_any_strides() -> None:
    a, b, out = torch.randn(4, 5, 6), torch.randn(6, 4, 3).transpose(0, 1), torch.zeros(5, 4, 3).transpose(0, 1)
    launch_batch(a, b, out)()
    torch.testing.assert_close(out, a @ b, atol=ATOL, rtol=RTOL)
    none = torch.empty(0, 8, 8)[:, ::4, ::4]
    launch_batch(none, none, torch.empty(0, 2, 2))()


@needs_small_kernels
@pytest.mark.usefixtures("one_thread")
def test_runs_and_replays_of_a_plan_read_the_blocks() -> None:
    builder, spec = GraphBuilder("product"), TensorSpec((32, 1024), "float32")
    x, w = builder.input("x", spec), builder.param("w", TensorSpec((1024, 64), "float32"))
    weight = torch.randn(1024, 64) / 32
    program = compile_graph(
        builder.build(builder.emit("aten.matmul.default", [x, w], [("y", TensorSpec((32, 64), "float32"))])),
        {"w": weight},
    )
    assert program.packed_bytes == weight.nbytes
    for _ in range(3):
        feed = {"x": torch.randn(32, 1024)}
        found = program.run(feed)["y"]
        torch.testing.assert_close(found, feed["x"] @ weight, atol=ATOL, rtol=RTOL)
        assert torch.equal(program.replay(feed)["y"], found)


@needs_small_kernels
@pytest.mark.usefixtures("one_thread")
def test_a_context_has_the_kernels_that_its_program_was_compiled_with() -> None:
    """Other kernels sum in another order, and one program has the same bits in all of its contexts and captures."""
    module, x = torch.nn.Linear(256, 256), torch.randn(64, 256)
    program, feed = compile_module(module, [x])
    (first,) = program.run(feed).values()
    torch.set_num_threads(2)
    later = [program.new_context().run(feed), program.replay(feed), program.new_context().run(feed)]
    assert all(torch.equal(first, y) for (y,) in (found.values() for found in later))
    other, _ = compile_module(module, [x])
    assert "_multiply" in str(program.context._launches[0])
    assert "_multiply" not in str(other.context._launches[0])


@needs_small_kernels
def test_what_numpy_does_about_overflow_changes_nothing() -> None:
    a, b, out = torch.full((2, 4, 4), 3e38), torch.full((2, 4, 4), 3e38), torch.empty(2, 4, 4)
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        launch_batch(a, b, out)()
    assert out.isinf().all()


def test_a_caller_may_resize_what_was_fed() -> None:
    x = torch.arange(12.0).view(3, 4)
    held = HeldArrays()
    (array,) = held.arrays_of(x.t())
    assert np.array_equal(array, x.t().numpy())
    fed = torch.ones(2, 2)
    held.arrays_of(fed)
    assert fed.resize_(4, 4).shape == (4, 4)
