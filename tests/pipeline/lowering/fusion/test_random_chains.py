"""Random chains of operators that fusions join, against torch: intermediates with several readers, sizes of 0 and 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as f

from pipeline.ir import Graph, check
from pipeline.ir.dims import dim_names, fix_dims
from pipeline.lowering.fusion import CPU_FUSIONS, CUDA_FUSIONS, fuse
from pipeline.runtime import RecordingDevice, compile_graph, compile_open_graph
from pipeline.runtime.slots import with_weights
from tests.support.torch_programs import feed_of, graph_of, sources

WIDTH: Final = 4

Move = Callable[["Chain", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

MOVES: Final[dict[str, Move]] = {
    "sin": lambda _, u, v, w: u.sin(),
    "tanh": lambda _, u, v, w: u.tanh(),
    "relu": lambda _, u, v, w: u.relu(),
    "gelu": lambda _, u, v, w: f.gelu(u, approximate="tanh"),
    "silu": lambda _, u, v, w: f.silu(u),
    "add": lambda _, u, v, w: (u + v) * 0.5,
    "sub": lambda _, u, v, w: (u - v) / 2,
    "mul": lambda _, u, v, w: u * v,
    "maximum": lambda _, u, v, w: torch.maximum(u, v),
    "clamp": lambda _, u, v, w: u.clamp(-0.5, 0.7),
    "row": lambda chain, u, v, w: u * chain.row,
    "column": lambda chain, u, v, w: u * chain.column,
    "mask": lambda chain, u, v, w: torch.where(chain.is_seen, u, v),
    "fill": lambda chain, u, v, w: u.masked_fill(chain.is_seen, -0.5),
    "softmax": lambda _, u, v, w: u.softmax(-1),
    "mean": lambda _, u, v, w: u - u.mean(-1, keepdim=True),
    "norm": lambda chain, u, v, w: f.layer_norm(u, (WIDTH,), chain.row, None, 0.5) * 0.5,
    "rms": lambda chain, u, v, w: f.rms_norm(u, (WIDTH,), chain.row, 0.5) * 0.5,
    "rotate": lambda chain, u, v, w: (u * chain.row + torch.cat((-u[..., 2:], u[..., :2]), -1) * chain.row) * 0.5,
    "product": lambda chain, u, v, w: chain.product(u),
    "product and relu": lambda chain, u, v, w: chain.product(u).relu(),
    "residual": lambda chain, u, v, w: (chain.product(u) + v) * 0.5,
    "attention": lambda _, u, v, w: (u @ v.transpose(2, 3) * 0.5).softmax(-1) @ w,
    "masked": lambda chain, u, v, w: (u @ v.transpose(2, 3) + chain.mask).softmax(-1) @ w,
    "by token": lambda _, u, v, w: (u.transpose(1, 2) * v.transpose(1, 2)).sin().transpose(1, 2),
}
"""Each keeps the shape, and elements of about 1 at most, so that roundings stay small."""

Step = tuple[str, int, int, int]


class Chain(nn.Module):
    """Moves on earlier values by number: each may have any number of readers, and some leave the chain."""

    def __init__(self, steps: Sequence[Step], leaving: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.steps, self.leaving = steps, leaving
        self.product = nn.Linear(WIDTH, WIDTH)
        self.row, self.column = torch.linspace(-1, 1, WIDTH), torch.linspace(0.2, 1, tokens)[:, None]
        self.mask = torch.linspace(-2, 2, tokens * tokens).view(1, 1, tokens, tokens)
        self.is_seen = torch.arange(heads * tokens * WIDTH).view(1, heads, tokens, WIDTH) % 3 > 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [x, y.transpose(1, 2)]
        for name, *operands in self.steps:
            values.append(MOVES[name](self, *(values[-1 - operand % len(values)] for operand in operands)))
        return values[-1], values[-1 - self.leaving % len(values)] * 2


STEPS = st.lists(
    st.tuples(st.sampled_from(sorted(MOVES)), *(st.integers(0, 3) for _ in range(3))), min_size=2, max_size=10
)


def inputs_of(batch: int, heads: int, tokens: int) -> list[torch.Tensor]:
    return [torch.randn(batch, heads, tokens, WIDTH).tanh(), torch.randn(batch, tokens, heads, WIDTH).tanh()]


def compare(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for ours, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)  # ten steps of roundings in another order


def graph_with_weights(chain: Chain, ins: Sequence[torch.Tensor], **options: Any) -> Graph:
    graph = graph_of(chain, ins, **options)
    return with_weights(graph, {name: held for name, held in chain.state_dict().items() if name in sources(graph)})


def run_fused(graph: Graph, ins: Sequence[torch.Tensor], names: Sequence[str]) -> list[torch.Tensor]:
    """The outputs after the fusions, on the device that they are for."""
    fused = fuse(graph, names)
    check(fused)
    program = compile_graph(fused, device=RecordingDevice(2**22) if names is CUDA_FUSIONS else "cpu")
    return list(program.run(feed_of(graph, ins)).values())


@pytest.mark.parametrize("names", [CPU_FUSIONS, CUDA_FUSIONS], ids=["cpu", "cuda"])
@settings(max_examples=12, deadline=None)
@given(steps=STEPS, leaving=st.integers(0, 3), sizes=st.tuples(*(st.integers(0, 3) for _ in range(3))))
def test_chains_of_static_sizes(names: Sequence[str], steps: list[Step], leaving: int, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module, ins = Chain(steps, leaving, *sizes[1:]).eval().requires_grad_(False), inputs_of(*sizes)
    compare(run_fused(graph_with_weights(module, ins), ins, names), module(*ins))


@settings(max_examples=8, deadline=None)
@given(steps=STEPS, leaving=st.integers(0, 3), heads=st.integers(1, 3), tokens=st.integers(1, 3))
def test_chains_of_an_open_batch_at_sizes_of_0_and_1(steps: list[Step], leaving: int, heads: int, tokens: int) -> None:
    """Fused before the size is known, and after it."""
    torch.manual_seed(0)
    module, ins = Chain(steps, leaving, heads, tokens).eval().requires_grad_(False), inputs_of(2, heads, tokens)
    batch = torch.export.Dim("batch", min=0)
    graph = graph_with_weights(module, ins, dynamic_shapes=({0: batch}, {0: batch}))
    (name,) = dim_names(graph)
    for names in (CPU_FUSIONS, CUDA_FUSIONS):
        fused = fuse(graph, names)
        check(fused)
        program = compile_open_graph(fused)
        for size in (0, 1, 3):
            ins = inputs_of(size, heads, tokens)
            compare(list(program.run(feed_of(graph, ins)).values()), module(*ins))
            compare(run_fused(fix_dims(graph, {name: size}), ins, names), module(*ins))
