"""Operators with bodies: branches, loops, scans, autocast and grad-mode regions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._higher_order_ops import map as torch_map
from torch._higher_order_ops import scan, while_loop
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.planning.check import violations
from pipeline.runtime import RecordingDevice, compile_graph
from pipeline.runtime.devices import TARGET, Device
from pipeline.runtime.kernels.aten.call import AtenCall
from pipeline.runtime.kernels.aten.fast_paths import FAST_PATHS
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


# The gradient of attention with dropout, which torch has for CUDA alone, on fake tensors of a CUDA device.

GRADIENT = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default


class CallsOfGradient(TorchDispatchMode):
    """Where the seed and the offset of each call of the operator lie."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[set[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is GRADIENT:
            self.places.append({tensor.device.type for tensor in args[7:9]})
        return func(*args, **(kwargs or {}))


class DeviceInRecord(RecordingDevice):
    def is_recording(self) -> bool:
        return True


@pytest.mark.parametrize(("device", "place"), [(RecordingDevice(2**10), "cpu"), (DeviceInRecord(2**10), "cuda")])
def test_random_numbers_begin_where_torch_reads_it(device: Device, place: str) -> None:
    with FakeTensorMode(), CallsOfGradient() as calls:
        x, sums = torch.empty(2, 4, 32, 16, device="cuda"), torch.empty(2, 4, 32, device="cuda")
        number = torch.empty((), dtype=torch.int64, device="cuda")
        args = (x, x, x, x, None, x, sums, number, number, 0.1, [True, True, True, False])
        names = [parameter.name for parameter in GRADIENT._schema.arguments]
        call = AtenCall(str(GRADIENT), GRADIENT, dict(zip(names, args, strict=False)), args, {}, range(4))
        token = TARGET.set(device)
        try:
            launch = FAST_PATHS[str(GRADIENT)](call, [torch.empty_like(x) for _ in range(4)])
        finally:
            TARGET.reset(token)
        assert launch is not None
        launch()
    assert calls.places == [{place}]
