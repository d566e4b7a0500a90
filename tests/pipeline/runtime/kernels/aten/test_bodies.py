"""Operators with bodies: branches, loops, scans, autocast and grad-mode regions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch._higher_order_ops import map as torch_map
from torch._higher_order_ops import scan, while_loop

from pipeline.planning.check import violations
from pipeline.runtime import compile_graph
from tests.support.torch_programs import graph_of, run_both

X = torch.linspace(-1, 2, 9).reshape(3, 3)


class Branch(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.layer(x).relu() + 1, lambda x: (x - 1).t().contiguous(), (x,)) * 2


class Loop(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Each step reads what the other made, so results may not be overwritten too early."""
        return while_loop(lambda i, a, b: i < 4, lambda i, a, b: (i + 1, b * 2, a + b), (torch.tensor(0), x, x + 1))


class Scan(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return scan(lambda carry, row: (carry + row, carry * row), x[0].clone(), x, dim=1)


class Map(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch_map(lambda row, y: row.exp() + y, x, x[0].clone())  # type: ignore[arg-type]


class Regions(torch.nn.Module):
    """Autocast rounds the product to bfloat16 and takes the softmax in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.layer(x)
            z = (y @ x).softmax(-1) + x
        with torch.no_grad():
            w = y.float() * 2
        return y, z, w


@pytest.mark.parametrize(
    ("module", "inputs"),
    [(Branch(), [X]), (Branch(), [-X]), (Loop(), [X]), (Scan(), [X]), (Map(), [X]), (Regions(), [X])],
    ids=["branch", "other branch", "loop", "scan", "map", "regions"],
)
def test_bodies_run(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> None:
    planned, plain, expected = run_both(module, inputs)
    assert [tensor.dtype for tensor in planned] == [tensor.dtype for tensor in expected]
    for actual in (planned, plain):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(actual, expected, strict=True))


def test_the_plan_checker_looks_into_bodies() -> None:
    module = Loop()
    plan = compile_graph(graph_of(module, [X])).plan
    ((at, (first, body)),) = plan.bodies.items()
    broken = replace(plan, bodies={at: (first, replace(body, calls=body.calls[:-1], order=body.order[:-1]))})
    assert violations(plan) == []
    assert [problems for problems in violations(broken) if f"in body 1 of call {at}" in problems]
