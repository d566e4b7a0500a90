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
from torch._dynamo.utils import counters

from benchmarks.cuda.checks import CHECKS
from benchmarks.cuda.measure import Bench, Timing, feed_of, graph_of, weights_of
from benchmarks.cuda.models import Classifier, Decode, Patches, Words, cnn, mlp
from pipeline.lowering.fusion import CUDA_FUSIONS, fuse
from pipeline.runtime import Capture, compile_graph
from pipeline.runtime.kernels.cuda import has_triton
from pipeline.runtime.slots import Feed
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
        figures["largest difference from eager"] = find_difference(found.cpu(), expected.cpu())
        figures["replay"] = bench.time(lambda: program.replay(feed, copy=False))
        figures |= launches_alone(program.capture(feed), feed, figures["replay"], bench)
        figures["eager"] = bench.time(lambda: there(*given))
        for mode in modes:
            bench.show(figures | ratios(figures))
            figures[mode] = peer(bench, there, mode, lambda compiled: compiled(*given))
    return figures | ratios(figures)


APART: Final = {torch.float16: 5e-2, torch.float32: 1e-3}
"""The largest difference of two forms of a model, as a share of the largest element: a wrong result has no time."""


def find_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of two tensors.

    Raises:
        AssertionError: it is too large for roundings.
    """
    difference = float((found.float() - expected.float()).abs().max())
    largest = float(expected.abs().max())
    if not difference <= APART[expected.dtype] * largest:
        raise AssertionError(f"a replay differs from eager torch by {difference}, whose largest element is {largest}")
    return difference


def launches_alone(capture: Capture, feed: Feed, replay: Timing, bench: Bench) -> Figures:
    """What of the host's time of a replay is torch's: the launches of graphs, and the copies of the inputs."""

    def launch() -> None:
        for part in capture._parts:
            part.replay()

    def copy_inputs() -> None:
        for name, write in capture._copied:
            write(feed[name])  # type: ignore[arg-type]

    launches, copies = bench.time(launch, 0.3), bench.time(copy_inputs, 0.3)
    return {
        "launch": launches,
        "copies of inputs": copies,
        "host µs beyond the launch": round(replay.host_us - launches.host_us, 2),
        "host µs beyond launch and copies": round(replay.host_us - launches.host_us - copies.host_us, 2),
    }


def peer(bench: Bench, function: Callable[..., Any], mode: str, call: Callable[[Callable[..., Any]], object]) -> Any:
    """The time of `call` with torch.compile's form of `function`; its error where it has one, since the other sides
    count all the same. So does a mode that leaves out what it stands for: torch does so without an error."""
    try:
        torch._dynamo.reset()
        counters.clear()
        compiled = bench.compile(function, mode)
        found = bench.time(lambda: call(compiled))
    except Exception as error:  # of any compiler
        return f"failed: {type(error).__name__}: {error}"[:300]
    skips = counters["inductor"]["cudagraph_skips"]
    return f"failed: torch.compile has left out {skips} graphs of CUDA, and has {found}" if skips else found


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
    with torch.no_grad():
        figures["largest difference from eager"] = find_difference(program.step(given).cpu(), loss_of(*given).cpu())
    figures["own reserved bytes"] = reserved(bench) - base
    figures["arena and pool, bytes"] = program._compiled.plan.arena_bytes + program.capture.pool_bytes
    figures["capture"] = program.capture.summary
    figures["replay"] = bench.time(lambda: program.step(given))
    figures["back to back, ms"] = bench.in_turns({"": lambda: program.step(given)})[""]
    figures["eager"] = bench.time(lambda: step(loss_of))
    for mode in MODES:
        bench.show(figures | ratios(figures))
        optimizer.zero_grad(set_to_none=True)  # the peer's own gradients are part of what it reserves
        torch._dynamo.reset()  # and nothing of the peer before it
        empty_cache(bench)
        before = reserved(bench)
        figures[mode] = peer(bench, loss_of, mode, step)
        figures[f"{mode} reserved bytes"] = reserved(bench) - before
        empty_cache(bench)  # of what its compiler and its first runs have had, and its steps have not
        figures[f"{mode} reserved bytes, without free ones"] = taken = reserved(bench) - before
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
    """Bytes per second of pointwise calls and norms as a share of the card's and of a copy's, and products next to
    cuBLAS on the same matrix. In milliseconds of a call of many in a row, so that the time of the host, which a replay
    has not, does not count.
    """
    rows, width = bench.pick((2**15, 4096), (16, 64))
    x = torch.randn(rows, width, device=bench.place, dtype=bench.pick(torch.float16, torch.float32))
    target = torch.empty_like(x)
    product = nn.Linear(width, width, bias=False)
    modules = {"pointwise": Chain(), "norm": Norm(width), "product": product}
    calls: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(x)}
    for name, module in modules.items():
        graph = graph_of(module.to(x.dtype), [torch.zeros(rows, width, dtype=x.dtype)])
        program = compile_graph(fuse(graph, FUSIONS), dict(module.state_dict()), device=bench.device)
        calls[name] = partial(program.run, feed_of(graph, [x]), copy=False)
    matrix = product.weight.detach().to(bench.place).t()
    calls["cuBLAS"] = lambda: torch.mm(x, matrix, out=target)
    times = bench.in_turns(calls)
    figures: Figures = {f"{name}, ms": time for name, time in times.items()}
    peak = bandwidth(bench)
    for name in ("copy", "pointwise", "norm"):
        figures[f"{name}, TB/s"] = speed = 2 * x.nbytes / times[name] / 1e9  # each reads as much as it writes
        if peak:
            figures[f"{name}: share of the card's bandwidth"] = round(speed / peak, 3)
        figures[f"{name}: share of a copy's"] = round(times["copy"] / times[name], 3)
    figures["product ÷ cuBLAS"] = round(times["product"] / times["cuBLAS"], 3)
    return figures


def bandwidth(bench: Bench) -> float:
    """Terabytes per second by the clock of the card's memory, in which each line of its bus moves two bits; 0 where the
    card tells no clock."""
    if bench.dry:
        return 1.0
    card = torch.cuda.get_device_properties()
    return card.memory_clock_rate * 1e3 * 2 * card.memory_bus_width / 8 / 1e12


def sanitizer(bench: Bench) -> Figures:
    """compute-sanitizer over one small capture, where the machine has it and lets it run."""
    tool = shutil.which("compute-sanitizer")
    if tool is None or bench.dry:
        return {"skipped": "a dry run" if bench.dry else "this machine has no compute-sanitizer"}
    code = "from benchmarks.cuda.checks import check_capture\nfrom pipeline.runtime.devices import find_device\n"
    code += "check_capture(find_device('cuda'))"
    # An error of the API is no fault: the driver answers by one where torch asks it about a pointer of the host.
    options = ["--report-api-errors", "no", "--error-exitcode", "9"]
    command = [tool, *options, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
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


AUTOTUNED: Final[Mapping[str, Forward]] = {
    "bert-1": bert(1), "vit-1": vit(1), "tiny": tiny(), "llama-decode": llama(), "bert-16": bert(16), "vit-16": vit(16),
}  # fmt: skip

ROWS: Final[Mapping[str, BenchRow]] = {
    **{f"check-{name}": BenchRow(partial(check, name), 150 if name == "operators" else 60) for name in CHECKS},
    "check-sanitizer": BenchRow(sanitizer, 150),
    "forward-bert-1": compiled(partial(forward, bert(1)), 75, FORWARD_GOAL),
    "train-mlp": compiled(partial(train, "mlp"), 60, f"≥ 10 × eager, {STEP_GOAL}"),
    "train-gpt2": compiled(partial(train, "gpt2"), 130, f"{STEP_GOAL}; memory ≤ 0.8 of its"),
    "forward-tiny": compiled(
        partial(forward, tiny()), 50, f"≥ 3 × eager, {FORWARD_GOAL}; host time of a replay ≤ 8 µs + the launch"
    ),
    "kernels": BenchRow(kernels, 40, "≥ 0.8 of the card's bandwidth, ≤ 1.05 × cuBLAS"),
    "forward-bert-16": compiled(partial(forward, bert(16)), 75, FORWARD_GOAL),
    "forward-llama-decode": compiled(partial(forward, llama()), 60, FORWARD_GOAL),
    "forward-vit-1": compiled(partial(forward, vit(1)), 75, FORWARD_GOAL),
    "forward-vit-16": compiled(partial(forward, vit(16)), 75, FORWARD_GOAL),
    "train-transformer": compiled(partial(train, "transformer"), 60, STEP_GOAL),
    "train-cnn": compiled(partial(train, "cnn"), 60, STEP_GOAL),
    **{
        f"autotune-{name}": BenchRow(partial(forward, of, modes=("max-autotune",)), 60, "a peer, without a goal")
        for name, of in AUTOTUNED.items()
    },
}
"""In the order of their value. The rows of kernels compile nothing, so they come before most others."""
