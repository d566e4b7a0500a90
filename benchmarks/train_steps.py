"""Recorded train steps next to eager torch, eager torch with the fused Adam, torch.compile, AOTInductor and JAX.

    python -m benchmarks.train_steps [--rounds 11] [--native] [--peers] [--jax PYTHON] [--only NAMES]

One process (JAX has another one), one thread, float32. The sides take turns, and every other round turns the order
around: a busy machine then slows all of them alike. A row holds the median of a side in µs, and the median of its
speed-up over eager torch with the default Adam in the same round. Each side begins with the same weights, and its first
losses have to be those of eager torch. `--native` adds the recorded steps with kernels in C++, which a compiler of this
machine builds. `--peers` compiles for minutes. `--jax` is an interpreter that has jax, for the
MLPs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn
from torch.optim import Adam

from benchmarks.measure import machine, versions_line
from benchmarks.train_peers import JaxStep, find_obstacle, make_aot_step, make_compiled_step
from pipeline.training import record_step

EAGER, FUSED, OURS, NATIVE = "eager", "fused Adam", "recorded", "recorded, native"
COMPILED, AOT, JAX = "torch.compile, one graph", "AOTInductor", "JAX jit, donated"

PEERS = {COMPILED: make_compiled_step, AOT: make_aot_step}

SLICE_S = 0.03
"""Seconds of one turn."""

LOSS = nn.CrossEntropyLoss()


@dataclass(frozen=True, slots=True)
class Case:
    """A module, the shape of its inputs, and the speed-up that is wanted."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    wanted: float


def mlp(width: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        inner = [layer for _ in range(2) for layer in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*inner, nn.Linear(width, 10))

    return make


class Side(Protocol):
    """One who trains."""

    def losses(self, steps: int) -> list[float]:
        """Do steps. Returns the loss of each."""
        ...

    def seconds(self, steps: int) -> float:
        """Do steps. Returns the time that they took."""
        ...


@dataclass(frozen=True, slots=True)
class LocalSide:
    """In this process; `step` returns the loss."""

    step: Callable[[], object]

    def losses(self, steps: int) -> list[float]:
        return [float(self.step()) for _ in range(steps)]  # type: ignore[arg-type]

    def seconds(self, steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        return time.perf_counter() - start


class Transformer(nn.Module):
    """Two encoder layers of width 128 with four heads, 32 places."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean(1))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(32, 10)),
    )


CASES = (
    Case("MLP 3×64, batch 8", mlp(64), (8, 64), 8.5),
    Case("MLP 3×256, batch 64", mlp(256), (64, 256), 2.35),
    Case("2-layer transformer, batch 1", Transformer, (1, 32, 128), 2.2),
    Case("2-layer transformer, batch 8", Transformer, (8, 32, 128), 1.3),
    Case("CNN + BatchNorm, batch 8", cnn, (8, 3, 16, 16), 1.5),
)


def sides(case: Case, *, peers: bool, jax: str, native: bool) -> dict[str, Side]:
    """Those who train the case, by name. `jax` is an interpreter that has jax, or empty."""
    torch.manual_seed(0)
    batch = (torch.randn(case.shape), torch.randint(0, 10, case.shape[:1]))
    first = case.make()

    def twin() -> nn.Module:
        module = case.make()
        module.load_state_dict(first.state_dict())
        return module

    def eager(module: nn.Module, optimizer: Adam) -> Callable[[], object]:
        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = LOSS(module(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    found: dict[str, Side] = {}
    for name, options in ((EAGER, {}), (FUSED, {"fused": True})):
        module = twin()
        found[name] = LocalSide(eager(module, Adam(module.parameters(), **options)))
    for name, make in PEERS.items() if peers and not find_obstacle() else ():
        found[name] = LocalSide(make(twin(), LOSS, batch))
    if jax and isinstance(first, nn.Sequential) and all(isinstance(layer, nn.Linear | nn.ReLU) for layer in first):
        found[JAX] = JaxStep(jax, first, batch)
    for name in (OURS, NATIVE) if native else (OURS,):
        module = twin()
        program = record_step(module, LOSS, Adam(module.parameters()), batch, native=name == NATIVE)
        found[name] = LocalSide(partial(program.step, batch))
    return found


def measure(sides: dict[str, Side], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median µs of a step by side, and the median of eager's time by that of the side."""
    runs, losses = {}, dict[str, list[float]]()
    for name, side in sides.items():
        losses[name] = side.losses(4)
        if not all(
            math.isclose(own, loss, rel_tol=1e-4) for own, loss in zip(losses[name], losses[EAGER], strict=True)
        ):
            raise SystemExit(f"{name} has the losses {losses[name]}, and eager torch {losses[EAGER]}")
        runs[name] = max(1, int(SLICE_S / side.seconds(1)))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            times[name].append(sides[name].seconds(runs[name]) / runs[name] * 1e6)
    ratios = {
        name: statistics.median(a / b for a, b in zip(times[EAGER], own, strict=True)) for name, own in times.items()
    }
    return {name: statistics.median(own) for name, own in times.items()}, ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--peers", action="store_true", help="torch's compilers too, which need a C++ compiler")
    parser.add_argument("--native", action="store_true", help="recorded steps with kernels in C++ too")
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--jax", default="", metavar="PYTHON", help="an interpreter that has jax")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| step | {EAGER}, µs | {FUSED} | {COMPILED} | {AOT} | {JAX} | {OURS} | {NATIVE} | wanted |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        if options.only not in case.name:
            continue
        own = sides(case, peers=options.peers, jax=options.jax, native=options.native)
        medians, ratios = measure(own, options.rounds)
        peers = " | ".join(f"{ratios[name]:.2f}" if name in ratios else "not run" for name in (*PEERS, JAX))
        ours = " | ".join(
            f"{ratios[name]:.2f} ({medians[name]:.0f} µs)" if name in ratios else "not run" for name in (OURS, NATIVE)
        )
        print(
            f"| {case.name} | {medians[EAGER]:.0f} | {ratios[FUSED]:.2f} | {peers} | {ours} | ≥ {case.wanted} |",
            flush=True,
        )
    obstacle = find_obstacle() or ("" if options.peers else "without --peers")
    if obstacle:
        print(f"\ntorch.compile and AOTInductor: not run, {obstacle}")
    print(f"\n{machine()}\n{versions_line()}")


if __name__ == "__main__":
    main()
