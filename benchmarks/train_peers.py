"""A train step by torch's own compilers: one graph of forward, loss, backward and Adam, whose states are buffers.

The graph is that of `pipeline.training.trace`, so torch.compile and AOTInductor begin with what a recorded step begins
with. Adam is written with plain operators, which Inductor joins.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from pipeline.training.trace import trace_step

__all__ = ["find_obstacle", "make_aot_step", "make_compiled_step"]

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[], object]


class AdamStep(nn.Module):
    """One step with the settings of `torch.optim.Adam` by default. Returns the loss."""

    def __init__(self, module: nn.Module, loss: nn.Module, batch: Batch) -> None:
        super().__init__()
        traced = trace_step(module, loss, batch)
        self.graph, self.trained = traced.module, len(traced.params)
        stored = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.count_stored = len(traced.placeholders)
        for index, name in enumerate(traced.placeholders):
            self.register_buffer(f"stored_{index}", stored[name].detach().clone())
        for index, name in enumerate(traced.params):
            self.register_buffer(f"first_{index}", torch.zeros_like(stored[name]))
            self.register_buffer(f"second_{index}", torch.zeros_like(stored[name]))
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        stored = [self.get_buffer(f"stored_{index}") for index in range(self.count_stored)]
        loss, _, *results = self.graph(*stored, x, target)
        steps = self.get_buffer("steps").add_(1)
        rate, root = 1e-3 / (1 - 0.9**steps), (1 - 0.999**steps).sqrt()
        for index, gradient in enumerate(results[: self.trained]):
            first, second = self.get_buffer(f"first_{index}"), self.get_buffer(f"second_{index}")
            first.lerp_(gradient, 0.1)
            second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            stored[index].sub_(rate * first / (second.sqrt() / root + 1e-8))
        for buffer, after in zip(stored[self.trained :], results[self.trained :], strict=True):
            buffer.copy_(after)
        return loss


def find_obstacle(peer: str) -> str:
    """Why a peer cannot be run here; empty where it can."""
    if peer == "JAX":
        return "" if importlib.util.find_spec("jax") else "not installed"
    return "" if shutil.which("g++") or shutil.which("clang++") else "no C++ compiler"


def make_compiled_step(module: nn.Module, loss: nn.Module, batch: Batch) -> Step:
    step = torch.compile(AdamStep(module, loss, batch), fullgraph=True)

    def run() -> object:
        with torch.no_grad():
            return step(*batch)

    return run


def make_aot_step(module: nn.Module, loss: nn.Module, batch: Batch) -> Step:
    with torch.no_grad():
        program = torch.export.export(AdamStep(module, loss, batch), batch)
        folder = Path(tempfile.mkdtemp())
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "step.pt2"))
        step = torch._inductor.aoti_load_package(package)
    shutil.rmtree(folder)

    def run() -> object:
        with torch.no_grad():
            return step(*batch)

    return run
