"""Modules, and the Graphs that from_torch makes of them, as text."""

from __future__ import annotations

import textwrap

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F  # noqa: N812

from pipeline.errors import Unsupported
from pipeline.importers.from_torch import from_torch, functionalize_program
from pipeline.ir import Graph, Role, check, from_text, to_text


def graph_of(module: nn.Module, *args: object, functionalized: bool = True, **options: object) -> Graph:
    dims = options.pop("dims", None)
    program = torch.export.export(module.eval(), args, strict=False, **options)
    graph = from_torch(functionalize_program(program) if functionalized else program, "g", dims=dims)
    check(graph)
    assert to_text(from_text(to_text(graph))) == to_text(graph)
    return graph


def assert_ops(graph: Graph, expected: str) -> None:
    """The op lines of `graph`, without their places in the source, are these."""
    lines = [line.strip() for line in to_text(graph).splitlines() if " = " in line and "update" not in line]
    ops = [line.partition(" @")[0].partition(" node ")[0] for line in lines]
    assert ops == textwrap.dedent(expected).strip().splitlines()


class Tricky(nn.Module):
    """Calls whose arguments are easily put in the wrong place."""

    def forward(self, x: torch.Tensor, t: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            torch.clamp(x, max=t),
            F.layer_norm(x, (4,), weight=None, bias=t),
            F.scaled_dot_product_attention(x[None], x[None], x[None], scale=0.5),
            x.sum(dim=1, dtype=torch.float64),
            x[:, i],
            torch.cat([x, x], 1),
            torch.full((2,), float("-inf")),
            x.unbind(0)[1],
        )


def test_every_argument_has_its_name() -> None:
    graph = graph_of(Tricky(), torch.randn(2, 4), torch.randn(4), torch.tensor([0, 3]))
    assert_ops(
        graph,
        """
        %3 "clamp": float32[2, 4] = aten.clamp.Tensor(%0, %1) {self: $0, max: $1}
        %4 "layer_norm": float32[2, 4] = aten.layer_norm.default(%0, %1) \
{input: $0, normalized_shape: [4], bias: $1, eps: 1e-05, cudnn_enable: false}
        %5 "unsqueeze": float32[1, 2, 4] = aten.unsqueeze.default(%0) {self: $0, dim: 0}
        %6 "unsqueeze_1": float32[1, 2, 4] = aten.unsqueeze.default(%0) {self: $0, dim: 0}
        %7 "unsqueeze_2": float32[1, 2, 4] = aten.unsqueeze.default(%0) {self: $0, dim: 0}
        %8 "scaled_dot_product_attention": float32[1, 2, 4] = aten.scaled_dot_product_attention.default(%5, %6, %7) \
{query: $0, key: $1, value: $2, scale: 0.5}
        %9 "sum_1": float64[2] = aten.sum.dim_IntList(%0) {self: $0, dim: [1], dtype: word("dtype", "float64")}
        %10 "index": float32[2, 2] = aten.index.Tensor(%0, %2) {self: $0, indices: [none, $1]}
        %11 "cat": float32[2, 8] = aten.cat.default(%0, %0) {tensors: [$0, $1], dim: 1}
        %12 "full": float32[2] = aten.full.default() \
{size: [2], fill_value: -inf, device: word("device", "cpu"), pin_memory: false}
        %13 "unbind_0": float32[4], %14 "unbind_1": float32[4] = aten.unbind.int(%0) {self: $0}
        """,
    )
    assert graph.outputs == (3, 4, 8, 9, 10, 11, 12, 14)


class Writes(nn.Module):
    """A cache that is written by slices, a counter, an argument that is overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        self.cache[:, 1] = x
        x.mul_(2)
        return self.cache.sum()


def test_writes_become_values_and_updates() -> None:
    graph = graph_of(Writes(), torch.randn(2))
    assert_ops(
        graph,
        """
        %3 "add": int64[] = aten.add.Tensor(%1) {self: $0, other: 1}
        %4 "select": float32[2] strides [4] = aten.select.int(%0) {self: $0, dim: 1, index: 1}
        %5 "copy": float32[2] strides [4] = aten.copy.default(%4, %2) {self: $0, src: $1}
        %6 "select_scatter": float32[2, 4] = aten.select_scatter.default(%0, %5) \
{self: $0, src: $1, dim: 1, index: 1}
        %7 "mul": float32[2] = aten.mul.Tensor(%2) {self: $0, other: 2}
        %8 "sum_1": float32[] = aten.sum.default(%6) {self: $0}
        """,
    )
    assert [value.name for value in graph.with_role(Role.STATE)] == ["b_cache", "b_seen"]
    assert graph.updates == {0: 6, 1: 3, 2: 7}


def test_nothing_is_functionalized_that_need_not_be() -> None:
    """torch functionalizes a whole program, and dropout would be a clone then. A BatchNorm writes when it trains."""
    norm = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(2))
    kinds = [op.kind for op in graph_of(norm, torch.randn(2, 2)).ops]
    assert kinds == ["aten.dropout.default", "aten.batch_norm.default"]
    program = torch.export.export(norm.train(), (torch.randn(2, 2),), strict=False)
    assert len(from_torch(functionalize_program(program)).updates) == 3


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def twice(i: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return i + 1, x * 2

        y = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        _, z = torch.while_loop(lambda i, x: i < 3, twice, (torch.zeros((), dtype=torch.int64), y))
        return z


@pytest.mark.filterwarnings("ignore")  # torch's own, while it traces bodies
def test_bodies_are_graphs_of_their_own() -> None:
    graph = graph_of(Branches(), torch.randn(2))
    bodies = {op.kind: [[inner.kind for inner in body.ops] for body in op.bodies] for op in graph.ops if op.bodies}
    assert bodies == {
        "higher_order.cond": [["aten.sin.default"], ["aten.cos.default"]],
        "higher_order.while_loop": [["aten.lt.Scalar"], ["aten.add.Tensor", "aten.mul.Tensor"]],
    }


class Sized(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0] * 2, 3) + torch.arange(x.shape[0] // 2 + 1).sum()


def test_dims_keep_their_names_and_ranges() -> None:
    shapes = {"x": {0: Dim("batch", min=2, max=64)}}
    program = torch.export.export(Sized(), (torch.randn(4, 6),), dynamic_shapes=shapes, strict=False)
    symbol = str(next(iter(program.range_constraints)))
    graph = from_torch(program, "g", dims={symbol: "batch"})
    assert_ops(
        graph,
        """
        %1 "reshape": float32["2*batch", 3] = aten.reshape.default(%0) {self: $0, shape: [size("2*batch"), 3]}
        %2 "arange": int64["((batch//2)) + 1"] = aten.arange.default() \
{end: size("((batch//2)) + 1"), device: word("device", "cpu"), pin_memory: false}
        %3 "sum_1": int64[] = aten.sum.default(%2) {self: $0}
        %4 "add": float32["2*batch", 3] = aten.add.Tensor(%1, %3) {self: $0, other: $1}
        """,
    )
    assert (graph.dims["batch"].least, graph.dims["batch"].most) == (2, 64)


def test_a_size_that_follows_from_numbers_is_refused_with_its_place() -> None:
    class Counts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.nonzero()

    with pytest.raises(Unsupported, match=r"aten.nonzero.default 'nonzero' .*test_from_torch.py:\d+\): the size u0"):
        graph_of(Counts(), torch.randn(2))


def test_names_do_not_collide() -> None:
    """An input that is called like an op, and a result of one op that would be called like another op."""

    class Clash(nn.Module):
        def forward(self, add: torch.Tensor, unbind_1: torch.Tensor) -> torch.Tensor:
            first = (add + unbind_1).unbind(0)
            second = (add * 2).unbind(0)
            return first[0] + first[1] + second[0] + second[1]

    graph = graph_of(Clash(), torch.randn(2, 2), torch.randn(2, 2))
    names = [value.name for value in graph.values]
    assert len(set(names)) == len(names)
    assert [op.name for op in graph.ops][:3] == ["add_1", "unbind", "mul"]


def test_each_op_says_where_it_comes_from() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).t() + 1

    graph = graph_of(Two(), torch.randn(2, 2))
    assert [op.origin for op in graph.ops] == ["inner.0", "inner.1", "", ""]
    assert all("test_from_torch.py:" in op.line for op in graph.ops)
    assert graph.value("t").strides == (1, 2)
    assert graph.sources == {0: ("inner.0.weight",), 1: ("inner.0.bias",)}
