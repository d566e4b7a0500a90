"""Max pooling by shifted views against torch's kernels, to the bit: a maximum rounds nothing."""

from __future__ import annotations

from typing import Any

import onnx
import onnx.parser
import pytest
import torch
from torch.nn import functional

from pipeline.errors import UsageError
from pipeline.importers.from_onnx import from_onnx
from pipeline.importers.from_torch import from_torch, functionalize_program
from pipeline.ir.parse import from_text
from pipeline.runtime import compile_graph
from pipeline.runtime.kernels.products import PoolWindow, launch_max_pool

POOLS = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}

WINDOWS = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 3, "stride": 1, "padding": 1},
    {"kernel_size": 3, "stride": 2, "ceil_mode": True},
    {"kernel_size": 3, "stride": 3, "padding": 1, "dilation": 2, "ceil_mode": True},
    {"kernel_size": 2, "stride": 4},
]


class Pool(torch.nn.Module):
    def __init__(self, axes: int, **window: Any) -> None:
        super().__init__()
        self.axes, self.window = axes, window

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return POOLS[self.axes](x, **self.window)


def run_planned(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    program = torch.export.export(module, (torch.empty_like(x),), strict=True)
    graph = from_torch(functionalize_program(program))
    (found,) = compile_graph(graph).run({graph.values[graph.inputs[0]].name: x}).values()
    return found


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("axes", POOLS)
def test_pools_of_torch(axes: int, window: dict[str, Any]) -> None:
    """All numbers are negative, so that a pad of 0 would be seen."""
    x = -torch.rand(2, 3, *(9, 8, 7)[:axes])
    x[0, 0, 2], x[1, 2, 0] = -torch.inf, torch.nan
    torch.testing.assert_close(
        run_planned(Pool(axes, **window), x), POOLS[axes](x, **window), rtol=0, atol=0, equal_nan=True
    )


def test_an_image_without_a_batch_and_one_with_channels_last() -> None:
    x = torch.randn(4, 9, 9)
    torch.testing.assert_close(run_planned(Pool(2, kernel_size=3), x), functional.max_pool2d(x, 3), rtol=0, atol=0)
    last = torch.randn(1, 4, 9, 9).contiguous(memory_format=torch.channels_last)
    found = run_planned(Pool(2, kernel_size=3), last)
    torch.testing.assert_close(found, functional.max_pool2d(last, 3), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int64])
def test_every_dtype_has_a_lowest_number_for_the_pads(dtype: torch.dtype) -> None:
    """One element, two windows: none of the window's elements is in both, so the result is filled first."""
    x, out = torch.tensor([[[-3]]]).to(dtype), torch.empty(1, 1, 2, dtype=dtype)
    launch = launch_max_pool(x, out, PoolWindow((2,), (1,), (1,), (1,)))
    assert launch is not None
    launch()
    assert out.tolist() == [[[x.item(), x.item()]]]


@pytest.mark.parametrize(
    ("x", "out", "pads"),
    [((0, 1, 9, 9), (0, 1, 7, 7), 0), ((1, 2, 5, 1), (1, 2, 3, 0), 0), ((1, 1, 0, 1), (1, 1, 0, 1), 1)],
)
def test_an_empty_image_or_no_window_is_nothing_to_do(x: tuple[int, ...], out: tuple[int, ...], pads: int) -> None:
    launch = launch_max_pool(torch.ones(x), torch.ones(out), PoolWindow((3, 3), (1, 1), (pads, pads), (1, 1)))
    assert launch is not None
    launch()


def test_an_element_of_the_window_that_is_padding_in_every_window_is_left_out() -> None:
    x = -torch.rand(2, 3, 1, 2)
    found = run_planned(Pool(2, kernel_size=3, stride=1, padding=1), x)
    torch.testing.assert_close(found, functional.max_pool2d(x, 3, 1, 1), rtol=0, atol=0)


def test_a_large_window_and_another_order_of_axes_are_left_to_torch() -> None:
    row, line = torch.ones(1, 1, 40), torch.empty(1, 1, 8)
    assert launch_max_pool(row, line, PoolWindow((33,), (1,), (0,), (1,))) is None
    assert launch_max_pool(row, line, PoolWindow((32,), (1,), (0,), (1,))) is not None
    small = PoolWindow((2, 2), (1, 1), (0, 0), (1, 1))
    assert launch_max_pool(torch.ones(1, 2, 2, 2), torch.empty(1, 2, 1, 1), small) is not None  # one pixel has no order
    turned = torch.empty(1, 2, 8, 8).contiguous(memory_format=torch.channels_last)
    assert launch_max_pool(torch.ones(1, 2, 9, 9), turned, small) is None
    assert launch_max_pool(torch.ones(1, 2, 9, 9), turned.contiguous(), small) is not None
    x = torch.randn(1, 2, 9, 9)
    torch.testing.assert_close(run_planned(Pool(2, kernel_size=6), x), functional.max_pool2d(x, 6), rtol=0, atol=0)


POOL = """
graph "pool" (%0 "x": float32[1, 1, 4, 4]) {{
  %1 "y": float32[{out}] = aten.max_pool2d.default(%0) {{self: $0, kernel_size: [2], stride: []}}

  return %1
}}
"""


def test_a_plan_takes_views_and_not_the_kernel_of_torch() -> None:
    program = compile_graph(from_text(POOL.format(out="1, 1, 2, 2")))
    (y,) = program.run({"x": torch.arange(16.0).view(1, 1, 4, 4)}).values()
    assert y.flatten().tolist() == [5, 7, 13, 15]
    assert "maximum" in str(program.context._launches)


def test_no_strides_are_those_of_the_window_and_another_shape_is_an_error_of_torch() -> None:
    x = torch.randn(1, 1, 4, 4)
    found = compile_graph(from_text(POOL.format(out="1, 1, 2, 2"))).run({"x": x})["y"]
    assert torch.equal(found, functional.max_pool2d(x, 2))
    with pytest.raises(
        UsageError, match=r"max_pool2d.default\): found float32\[1, 1, 1, 1\] for what it makes, expected"
    ):
        compile_graph(from_text(POOL.format(out="1, 1, 1, 1")))


@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool"])
def test_a_window_that_does_not_fit_gives_an_empty_result(kind: str) -> None:
    """With ceil_mode, as onnxruntime gives it; torch refuses to pool such an image."""
    op = onnx.parser.parse_node(f"y = {kind} <kernel_shape = [2, 2], ceil_mode = 1> (x)")
    x, y = (onnx.helper.make_tensor_value_info(name, 1, (1, 2, 5, size)) for name, size in (("x", 1), ("y", 0)))
    model = onnx.helper.make_model(onnx.helper.make_graph([op], "g", [x], [y]))
    program = compile_graph(from_onnx(model))
    for found in (program.run({"x": torch.ones(1, 2, 5, 1)}), program.replay({"x": torch.ones(1, 2, 5, 1)})):
        assert found["y"].shape == (1, 2, 4, 0)
