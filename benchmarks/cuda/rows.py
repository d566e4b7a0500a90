"""The rows: checks first, then figures, in the order of their value. Each runs in a process of its own."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from benchmarks.cuda.checks import CHECKS
from benchmarks.cuda.measure import Bench, feed_of, graph_of, weights_of
from benchmarks.cuda.models import Classifier, Decode, Patches, Words, cnn, mlp
from pipeline.lowering.fusion import CUDA_FUSIONS, fuse
from pipeline.runtime import compile_graph
from pipeline.runtime.kernels.cuda import has_triton
from pipeline.training import record_step

Figures = dict[str, Any]

FUSIONS: Final = CUDA_FUSIONS if has_triton() else tuple(name for name in CUDA_FUSIONS if name != "rows")
"""A machine without a compiler of C has figures too."""


@dataclass(frozen=True, slots=True)
class BenchRow:
    run: Callable[[Bench], Figures]
    limit_s: int
    """The process is ended after so many seconds."""
    goal: str = ""
    is_compiled: bool = False
    """Whether torch.compile has something to do before the row is measured."""


def check(name: str, bench: Bench) -> Figures:
    return {"shows": CHECKS[name](bench.device)}


@dataclass(frozen=True, slots=True)
class Forward:
    """A module and its inputs on the CPU, at real and at tiny sizes."""

    make: Callable[[bool], nn.Module]
    inputs: Callable[[bool], Sequence[torch.Tensor]]
    dtype: torch.dtype = torch.float16


def ids(batch: int, tokens: int, words: int) -> torch.Tensor:
    return torch.arange(batch * tokens).view(batch, tokens) % words


def bert(batch: int) -> Forward:
    return Forward(
        lambda dry: Words(*((30, 16, 32, 2, 4) if dry else (30522, 512, 768, 12, 12)), is_causal=False),
        lambda dry: [ids(batch, 8 if dry else 128, 30)],
    )


def vit(batch: int) -> Forward:
    return Forward(
        lambda dry: Patches(*((16, 8, 32, 2, 4) if dry else (224, 16, 768, 12, 12))),
        lambda dry: [torch.randn(batch, 3, *(2 * [16 if dry else 224]))],
    )


def tiny() -> Forward:
    return Forward(lambda _: Words(100, 32, 64, 2, 4, is_causal=False), lambda _: [ids(1, 16, 100)], torch.float32)


def llama() -> Forward:
    def inputs(dry: bool) -> list[torch.Tensor]:
        width, cache = (64, 16) if dry else (4096, 2048)
        mask = torch.zeros(1, 1, 1, cache)
        mask[..., cache // 2 + 1 :] = -10000.0
        return [torch.randn(1, 1, width) * 0.1, torch.tensor([cache // 2]), mask]

    return Forward(lambda dry: Decode(*((64, 4, 128, 16) if dry else (4096, 32, 11008, 2048))), inputs)


MODES: Final = ("reduce-overhead", "default")
"""Modes of torch.compile. The goals are about the first mode, so it is measured first: a row may run out of time."""


def forward(of: Forward, bench: Bench, modes: Sequence[str] = MODES) -> Figures:
    """A replay next to eager torch and torch.compile, all in one process."""
    torch.manual_seed(0)
    module = of.make(bench.dry).eval().requires_grad_(requires_grad=False)
    inputs = list(of.inputs(bench.dry))
    dtype = bench.pick(of.dtype, torch.float32)
    there = copy.deepcopy(module).to(bench.place, dtype)
    given = [tensor.to(bench.place, dtype if tensor.is_floating_point() else None) for tensor in inputs]
    if bench.warms:
        with torch.inference_mode():
            return {mode: peer(bench, there, mode, lambda compiled: compiled(*given)) for mode in modes}
    graph = graph_of(
        module.to(dtype), [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in inputs]
    )
    program = compile_graph(fuse(graph, FUSIONS), weights_of(graph, there), device=bench.device)
    feed = feed_of(graph, given)
    report = program.capture(feed).report
    figures: Figures = {
        "capture": report.summary,
        "by_python": len(report.by_python),
        "arena_bytes": program.plan.arena_bytes,
        "pool_bytes": report.pool_bytes,
        "live_bytes": program.plan.live_bytes,
    }
    with torch.inference_mode():
        expected = there(*given)
        (found,) = program.replay(feed).values()
        figures["largest difference from eager"] = float((found.cpu().float() - expected.cpu().float()).abs().max())
        figures["replay"] = bench.time(lambda: program.replay(feed, copy=False))
        figures["eager"] = bench.time(lambda: there(*given))
        for mode in modes:
            bench.show(figures | ratios(figures))
            figures[mode] = peer(bench, there, mode, lambda compiled: compiled(*given))
    return figures | ratios(figures)


def peer(bench: Bench, function: Callable[..., Any], mode: str, call: Callable[[Callable[..., Any]], object]) -> Any:
    """The time of `call` with torch.compile's form of `function`; its error where it has one, since the other sides
    count all the same."""
    try:
        torch._dynamo.reset()
        compiled = bench.compile(function, mode)
        return bench.time(lambda: call(compiled))
    except Exception as error:  # of any compiler
        return f"failed: {type(error).__name__}: {error}"[:300]


def ratios(figures: Figures) -> Figures:
    """How many times as fast the replay is as each peer, by device time."""
    own = figures["replay"].device_ms
    return {
        f"{name} ÷ replay": round(figures[name].device_ms / own, 3)
        for name in ("eager", "default", "reduce-overhead", "max-autotune")
        if name in figures and not isinstance(figures[name], str)
    }


@dataclass(frozen=True, slots=True)
class Step:
    make: Callable[[bool], nn.Module]
    batch: Callable[[bool], tuple[torch.Tensor, torch.Tensor]]


STEPS: Final[Mapping[str, Step]] = {
    "mlp": Step(
        lambda dry: mlp(16 if dry else 256),
        lambda dry: (torch.randn(64, 16 if dry else 256), torch.arange(64) % 10),
    ),
    "transformer": Step(
        lambda dry: Classifier(*((50, 32, 2, 4) if dry else (1000, 256, 2, 4))),
        lambda dry: (ids(8, 8 if dry else 128, 50), torch.arange(8) % 10),
    ),
    "cnn": Step(
        lambda _: cnn(),
        lambda dry: (torch.randn(32, 3, *(2 * [8 if dry else 32])), torch.arange(32) % 10),
    ),
    "gpt2": Step(
        lambda dry: Words(*((50, 16, 32, 2, 4) if dry else (50257, 1024, 768, 12, 12)), is_causal=True),
        lambda dry: (ids(4, 8 if dry else 256, 50), torch.arange(4 * (8 if dry else 256)) % 50),
    ),
}


def train(name: str, bench: Bench) -> Figures:
    """A recorded step next to eager torch with the fused Adam, and to torch.compile of forward, loss and backward."""
    torch.manual_seed(0)
    of, loss = STEPS[name], nn.functional.cross_entropy
    module, batch = of.make(bench.dry), of.batch(bench.dry)
    twin = copy.deepcopy(module).to(bench.place)
    given = tuple(tensor.to(bench.place) for tensor in batch)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-4, fused=True)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss(twin(x), y)

    def step(compiled: Callable[..., Any]) -> None:
        optimizer.zero_grad(set_to_none=True)
        compiled(*given).backward()
        optimizer.step()

    if bench.warms:
        return {mode: peer(bench, loss_of, mode, step) for mode in MODES}
    figures: Figures = {}
    empty_cache(bench)
    base = reserved(bench)
    program, figures["recorded"] = recorded(module, batch, bench)
    program.step(given)
    figures["own reserved bytes"] = reserved(bench) - base
    figures["arena and pool, bytes"] = program._compiled.plan.arena_bytes + program.capture.pool_bytes
    figures["capture"] = program.capture.summary
    figures["replay"] = bench.time(lambda: program.step(given))
    figures["back to back, ms"] = bench.back_to_back(lambda: program.step(given))
    figures["eager"] = bench.time(lambda: step(loss_of))
    for mode in MODES:
        bench.show(figures | ratios(figures))
        optimizer.zero_grad(set_to_none=True)  # the peer's own gradients are part of what it reserves
        torch._dynamo.reset()  # and nothing of the peer before it
        empty_cache(bench)
        before = reserved(bench)
        figures[mode] = peer(bench, loss_of, mode, step)
        figures[f"{mode} reserved bytes"] = taken = reserved(bench) - before
        if taken > 0:
            figures[f"arena and pool ÷ {mode}"] = round(figures["arena and pool, bytes"] / taken, 3)
    return figures | ratios(figures)


def recorded(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], bench: Bench) -> tuple[Any, str]:
    """The program of a module on the device, with torch's own attention there; else of the module on the CPU."""
    loss, adam = nn.functional.cross_entropy, partial(torch.optim.AdamW, lr=1e-4)
    try:
        there = copy.deepcopy(module).to(bench.place)
        moved = (batch[0].to(bench.place), batch[1].to(bench.place))
        return record_step(there, loss, adam(there.parameters()), moved, device=bench.device), "on the device"
    except Exception as error:  # the row is worth more than its first way
        program = record_step(module, loss, adam(module.parameters()), batch, device=bench.device)
        return program, f"on the CPU, since on the device: {type(error).__name__}: {error}"[:300]


def reserved(bench: Bench) -> int:
    return 0 if bench.dry else torch.cuda.memory_reserved()


def empty_cache(bench: Bench) -> None:
    if not bench.dry:
        torch.cuda.empty_cache()


class Chain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * 2 + 1)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def kernels(bench: Bench) -> Figures:
    """Bytes per second of pointwise calls and norms as a share of a copy's, and products next to cuBLAS.

    In milliseconds of a call of many in a row, so that the time of the host, which a replay has not, does not count.
    """
    rows, width = bench.pick((2**15, 4096), (16, 64))
    x = torch.randn(rows, width, device=bench.place, dtype=bench.pick(torch.float16, torch.float32))
    target = torch.empty_like(x)
    figures: Figures = {"copy": bench.back_to_back(lambda: target.copy_(x))}
    for name, module in (("pointwise", Chain()), ("norm", Norm(width).to(x.dtype))):
        graph = graph_of(module, [torch.zeros(rows, width, dtype=x.dtype)])
        program = compile_graph(fuse(graph, FUSIONS), dict(module.state_dict()), device=bench.device)
        feed = feed_of(graph, [x])
        figures[name] = bench.back_to_back(lambda program=program, feed=feed: program.run(feed, copy=False))
        figures[f"{name}: share of a copy's bandwidth"] = round(figures["copy"] / figures[name], 3)
    matrix = torch.randn(width, width, device=bench.place, dtype=x.dtype)
    product = nn.Linear(width, width, bias=False).to(x.dtype)
    graph = graph_of(product, [torch.zeros(rows, width, dtype=x.dtype)])
    program = compile_graph(graph, dict(product.state_dict()), device=bench.device)
    feed = feed_of(graph, [x])
    figures["product"] = bench.back_to_back(lambda: program.run(feed, copy=False))
    figures["cuBLAS"] = bench.back_to_back(lambda: torch.mm(x, matrix, out=target))
    figures["product ÷ cuBLAS"] = round(figures["product"] / figures["cuBLAS"], 3)
    return figures


def sanitizer(bench: Bench) -> Figures:
    """compute-sanitizer over one small capture, where the machine has it and lets it run."""
    tool = shutil.which("compute-sanitizer")
    if tool is None or bench.dry:
        return {"skipped": "a dry run" if bench.dry else "this machine has no compute-sanitizer"}
    code = "from benchmarks.cuda.checks import check_capture\nfrom pipeline.runtime.devices import find_device\n"
    code += "check_capture(find_device('cuda'))"
    done = subprocess.run(
        [tool, "--error-exitcode", "9", sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    return read_sanitizer(done.returncode, done.stdout + done.stderr)


def read_sanitizer(code: int, said: str) -> Figures:
    """
    Raises:
        AssertionError: it found errors, or what it ran has failed.
    """
    if "ERROR SUMMARY" not in said:  # it did not come to look
        return {"skipped": f"compute-sanitizer refuses this machine: {said[-1500:]}"}
    if code:
        raise AssertionError(f"exit {code}: {said[-1500:]}")
    return {"errors": 0}


FORWARD_GOAL = "≥ 1.0 × reduce-overhead, ≥ 1.1 × at batch 1"

STEP_GOAL = "≥ 1.0 × reduce-overhead"


def compiled(run: Callable[[Bench], Figures], limit_s: int, goal: str) -> BenchRow:
    return BenchRow(run, limit_s, goal, is_compiled=True)


ROWS: Final[Mapping[str, BenchRow]] = {
    **{f"check-{name}": BenchRow(partial(check, name), 150 if name == "operators" else 60) for name in CHECKS},
    "forward-bert-1": compiled(partial(forward, bert(1)), 75, FORWARD_GOAL),
    "train-mlp": compiled(partial(train, "mlp"), 60, f"≥ 10 × eager, {STEP_GOAL}"),
    "train-gpt2": compiled(partial(train, "gpt2"), 130, f"{STEP_GOAL}; memory ≤ 0.8 of its"),
    "forward-tiny": compiled(partial(forward, tiny()), 50, "≥ 3 × eager; host time of a replay ≤ 8 µs + the launch"),
    "kernels": BenchRow(kernels, 40, "≥ 0.8 of the bandwidth, ≤ 1.05 × cuBLAS"),
    "forward-bert-16": compiled(partial(forward, bert(16)), 75, FORWARD_GOAL),
    "forward-llama-decode": compiled(partial(forward, llama()), 60, FORWARD_GOAL),
    "forward-vit-1": compiled(partial(forward, vit(1)), 75, FORWARD_GOAL),
    "forward-vit-16": compiled(partial(forward, vit(16)), 75, FORWARD_GOAL),
    "train-transformer": compiled(partial(train, "transformer"), 60, STEP_GOAL),
    "train-cnn": compiled(partial(train, "cnn"), 60, STEP_GOAL),
    "autotune-bert-1": BenchRow(partial(forward, bert(1), modes=("max-autotune",)), 60, "≥ 1.0 × max-autotune"),
    "autotune-vit-1": BenchRow(partial(forward, vit(1), modes=("max-autotune",)), 60, "≥ 1.0 × max-autotune"),
    "sanitizer": BenchRow(sanitizer, 60),
}
"""In the order of their value. The rows of kernels compile nothing, so they come before most others."""
