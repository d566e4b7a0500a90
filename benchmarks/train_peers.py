"""A train step by other compilers: torch's own, and JAX in an interpreter of its own.

For torch's compilers it is one graph of forward, loss, backward and Adam, whose states are buffers: the graph of
`pipeline.training.trace`, so they begin with what a recorded step begins with. Adam is written with plain operators,
which Inductor joins. For JAX an MLP is written in `train_jax.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from pipeline.training.trace import trace_step

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[], object]


class AdamStep(nn.Module):
    """One step with the settings of `torch.optim.Adam` by default. Returns the loss."""

    def __init__(self, module: nn.Module, loss: nn.Module, batch: Batch) -> None:
        super().__init__()
        traced = trace_step(module, loss, batch)
        self.graph, self.trained = traced.module, len(traced.params)
        self.changed = [index for index, name in enumerate(traced.placeholders) if name in traced.updates]
        stored = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.count_stored = len(traced.placeholders)
        for index, name in enumerate(traced.placeholders):
            self.register_buffer(f"stored_{index}", stored[name].detach().clone())
        for index, name in enumerate(traced.params):
            self.register_buffer(f"first_{index}", torch.zeros_like(stored[name]))
            self.register_buffer(f"second_{index}", torch.zeros_like(stored[name]))
        # Inductor takes a stored tensor of one number for a constant, though the graph writes to it: AOTInductor
        # would have done the first step at each step. So there are as many counts as it leaves alone.
        self.register_buffer("steps", torch.zeros(16))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        stored = [self.get_buffer(f"stored_{index}") for index in range(self.count_stored)]
        loss, _, *results = self.graph(*stored, x, target)
        steps = self.get_buffer("steps").add_(1)[0]
        rate, root = 1e-3 / (1 - 0.9**steps), (1 - 0.999**steps).sqrt()
        for index, gradient in enumerate(results[: self.trained]):
            first, second = self.get_buffer(f"first_{index}"), self.get_buffer(f"second_{index}")
            first.lerp_(gradient, 0.1)
            second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            stored[index].sub_(rate * first / (second.sqrt() / root + 1e-8))
        for index in self.changed:
            stored[index].copy_(results[self.trained + index])
        return loss


def find_obstacle() -> str:
    """Why torch's compilers cannot be run here; empty where they can."""
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


class JaxStep:
    """The step of an MLP in a process of another interpreter, which has jax. It does as many steps as it is asked."""

    def __init__(self, python: str, module: nn.Sequential, batch: Batch) -> None:
        layers = [layer for layer in module if isinstance(layer, nn.Linear)]
        weights = {f"weight_{number}": layer.weight.detach().numpy() for number, layer in enumerate(layers)}
        biases = {f"bias_{number}": layer.bias.detach().numpy() for number, layer in enumerate(layers)}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "step.npz"
            np.savez(path, input=batch[0].numpy(), target=batch[1].numpy(), **weights, **biases)
            self._process = subprocess.Popen(
                [python, str(Path(__file__).with_name("train_jax.py")), str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"},
            )
            self._ask("losses 0")  # the file has been read

    def losses(self, steps: int) -> list[float]:
        return self._ask(f"losses {steps}")

    def seconds(self, steps: int) -> float:
        return self._ask(f"seconds {steps}")[0]

    def _ask(self, question: str) -> list[float]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"JAX ended with exit code {self._process.wait()}")
        return [float(number) for number in answer.split()]
