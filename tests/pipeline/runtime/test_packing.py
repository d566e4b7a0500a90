"""Weights are packed when they are bound: which ones, for whom, and what they cost."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from pipeline.importers.from_torch import from_torch, functionalize_program
from pipeline.ir import Graph, TensorSpec, fix_dims
from pipeline.ops import GraphBuilder
from pipeline.runtime import CompiledProgram, compile_graph, compile_graphs, compile_open_graph
from pipeline.runtime.kernels.packing import (
    PackedMemory,
    PackedWeight,
    launch_convolution,
    pack_convolution,
    pack_product,
)
from pipeline.runtime.kernels.weight_forms import Convolution, FusedOperands

ATOL, RTOL = 1e-3, 2e-5
"""float32: sums of 2048 products of numbers near 1, in orders of their own."""

WIDE = 2048

X, W = torch.randn(32, WIDE), torch.randn(WIDE, WIDE)


def product(
    kind: str = "aten.matmul.default", *, dtype: str = "float32", role: str = "param", rows: int = 32
) -> CompiledProgram:
    builder = GraphBuilder("product")
    x = builder.input("x", TensorSpec((rows, WIDE), dtype))
    w = getattr(builder, role)("w", TensorSpec((WIDE, WIDE), dtype))
    outs = builder.emit(kind, [x, w], [("y", TensorSpec((rows, WIDE), dtype))])
    weights = {} if role == "input" else {"w": W.to(getattr(torch, dtype))}
    return compile_graph(builder.build(outs), weights)


@pytest.mark.parametrize("kind", ["aten.matmul.default", "aten.mm.default"])
def test_a_large_product_reads_a_packed_weight(kind: str) -> None:
    program = product(kind)
    assert program.packed_bytes >= W.nbytes
    torch.testing.assert_close(program.run({"x": X})["y"], X @ W, atol=ATOL, rtol=RTOL)


@pytest.mark.parametrize("given", [{"dtype": "float64"}, {"role": "state"}, {"role": "input"}, {"rows": 1}])
def test_other_dtypes_what_may_change_and_small_products_are_not_packed(given: dict[str, Any]) -> None:
    assert product(**given).packed_bytes == 0


def test_a_weight_that_comes_with_the_feed_is_not_packed() -> None:
    builder = GraphBuilder("fed")
    x, w = (
        builder.input("x", TensorSpec((32, WIDE), "float32")),
        builder.param("w", TensorSpec((WIDE, WIDE), "float32")),
    )
    program = compile_graph(
        builder.build(builder.emit("aten.matmul.default", [x, w], [("y", TensorSpec((32, WIDE), "float32"))]))
    )
    assert program.packed_bytes == 0
    for factor in (1, 2):
        torch.testing.assert_close(program.run({"x": X, "w": W * factor})["y"], X @ W * factor, atol=ATOL, rtol=RTOL)


def open_product() -> Graph:
    builder = GraphBuilder("product")
    x, w = (
        builder.input("x", TensorSpec(("rows", WIDE), "float32")),
        builder.param("w", TensorSpec((WIDE, WIDE), "float32")),
    )
    return builder.build(builder.emit("aten.matmul.default", [x, w], [("y", TensorSpec(("rows", WIDE), "float32"))]))


def packed_tensors() -> dict[int, torch.Tensor]:
    """The memory of the packed weights that are alive; who holds the result keeps them alive."""
    gc.collect()
    return {id(weight.tensor): weight.tensor for weight in gc.get_objects() if type(weight) is PackedWeight}


def test_plans_for_several_sizes_share_a_packed_weight() -> None:
    program = compile_open_graph(open_product(), {"w": W}, limit=2)
    before = packed_tensors()
    for rows in (32, 48, 64):
        x = torch.randn(rows, WIDE)
        torch.testing.assert_close(program.run({"x": x})["y"], x @ W, atol=ATOL, rtol=RTOL)
    assert len(packed_tensors().keys() - before.keys()) == 1


def test_entry_points_share_a_packed_weight() -> None:
    graphs = {f"rows {rows}": fix_dims(open_product(), {"rows": rows}) for rows in (32, 48)}
    before = packed_tensors()
    entries = compile_graphs(graphs, {"w": W})
    assert len(packed_tensors().keys() - before.keys()) == 1
    del entries


@pytest.mark.parametrize("rows", [32, 8])
def test_only_equal_packed_weights_have_one_memory(rows: int) -> None:
    memory = PackedMemory()
    inner = WIDE if rows == 32 else 128
    weights = [W[:64, :inner].contiguous() + offset for offset in (0, 1, 0)]
    first, other, same = (pack_product(rows, weight, least=1) for weight in weights)
    assert all(isinstance(weight, PackedWeight) for weight in (first, other, same))
    shared = [weight.in_memory(memory).tensor for weight in (first, other, same)]
    assert shared[0] is first.tensor
    assert shared[1] is other.tensor
    assert shared[2] is shared[0]


def test_a_packed_weight_that_no_program_holds_is_given_back() -> None:
    memory = PackedMemory()
    held = torch.ones(8)
    gone = weakref.ref(held)
    assert memory.share(held) is held
    del held
    assert gone() is None
    new = torch.ones(8)
    assert memory.share(new) is new


def test_all_contexts_share_one_packed_weight() -> None:
    program = product()
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(program.run({"x": X})["y"])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, found[0]) for one in found)
    packed = {id(context.bound.steps[0].attrs["packed"]) for context in (program.new_context(), program.new_context())}
    assert len(packed) == 1


class Layers(torch.nn.Module):
    """Products and a convolution in the forms in which torch writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDE, WIDE)
        self.right = torch.nn.Parameter(torch.randn(WIDE, WIDE) / 32)
        self.conv = torch.nn.Conv2d(4, 32, 3, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = self.linear(x)
        batched = x.view(4, 8, WIDE) @ self.right
        added = torch.addmm(self.linear.bias, rows, self.right)
        folded = torch.bmm(x.view(4, 8, WIDE), self.right.expand(4, WIDE, WIDE))
        return rows, batched, added, folded, self.conv(x.view(1, 4, 128, 128))


def test_operators_of_torch_read_packed_weights() -> None:
    model = Layers().eval().requires_grad_(False)
    graph = from_torch(functionalize_program(torch.export.export(model, (X,), strict=True)))
    program = compile_graph(graph, dict(model.state_dict()))
    steps = {step.call.out_vids[0] for step in program.context.bound.steps if "packed" in step.attrs}
    assert len(steps) == 5
    feed = {graph.values[graph.inputs[0]].name: X}
    for found, expected in zip(program.run(feed).values(), model(X), strict=True):
        torch.testing.assert_close(found, expected, atol=ATOL, rtol=RTOL)


def biases(count: int) -> dict[str, torch.Tensor]:
    """Biases whose numbers do not lie side by side: one number for all channels, every second number, a column."""
    return {
        "one number": torch.tensor([0.5]).expand(count),
        "every second": torch.arange(2.0 * count)[::2],
        "a column": torch.arange(3.0 * count).view(count, 3)[:, 1],
    }


CONVOLUTION = Convolution((1, 1), (1, 1), (1, 1), 1)


@pytest.mark.parametrize("form", [*biases(1)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("added", ["nothing", "its own result", "another tensor"])
def test_a_packed_convolution_reads_the_strides_of_its_bias(
    form: str, memory_format: torch.memory_format, added: str
) -> None:
    x, kernels, bias = torch.rand(2, 16, 16, 16), torch.rand(32, 16, 3, 3), biases(32)[form]
    packed = pack_convolution(TensorSpec(tuple(x.shape), "float32"), kernels, CONVOLUTION)
    assert packed is not None
    expected = torch.conv2d(x, kernels, bias.clone(), padding=1)
    out = torch.ones_like(expected, memory_format=memory_format)
    if added == "nothing":
        launch_convolution(packed, FusedOperands(x, out, bias), CONVOLUTION)()
    else:
        other = out if added == "its own result" else torch.ones_like(expected)
        launch_convolution(packed, FusedOperands(x, out, bias, other), CONVOLUTION)()
        expected += 1
    torch.testing.assert_close(out, expected, atol=ATOL, rtol=RTOL)


@pytest.mark.parametrize("form", [*biases(1)])
def test_a_packed_product_reads_the_strides_of_its_bias(form: str) -> None:
    bias, out = biases(WIDE)[form], torch.empty(32, WIDE)
    packed = pack_product(32, W)
    assert packed is not None
    launch = packed.launch(FusedOperands(X, out, bias))
    assert launch is not None
    launch()
    torch.testing.assert_close(out, X @ W.t() + bias, atol=ATOL, rtol=RTOL)


def test_one_number_as_the_bias_of_all_columns_of_a_plan() -> None:
    """An expanded constant is a view with a stride of 0."""
    builder = GraphBuilder("expanded")
    x, w = (
        builder.input("x", TensorSpec((32, WIDE), "float32")),
        builder.param("w", TensorSpec((WIDE, WIDE), "float32")),
    )
    number = builder.param("number", TensorSpec((1,), "float32"))
    (bias,) = builder.emit(
        "aten.expand.default", [number], [("bias", TensorSpec((WIDE,), "float32"))], {"size": (WIDE,)}
    )
    outs = builder.emit("aten.addmm.default", [bias, x, w], [("y", TensorSpec((32, WIDE), "float32"))])
    program = compile_graph(builder.build(outs), {"w": W, "number": torch.tensor([0.5])})
    assert program.packed_bytes
    torch.testing.assert_close(program.run({"x": X})["y"], X @ W + 0.5, atol=ATOL, rtol=RTOL)
