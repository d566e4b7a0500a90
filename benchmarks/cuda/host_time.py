"""What our own Python costs a replay: all but the launches, the copies and the guard of torch's dispatcher.

    python -m benchmarks.cuda.host_time

A program of the recording device is captured, then what it launches is taken out, and the order of streams answers as
that of CUDA does where the stream is the one of before. No GPU is needed.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, Final

import torch
from torch import nn

from benchmarks.cuda.measure import feed_of, graph_of, weights_of
from benchmarks.cuda.models import Classifier, Decode, mlp
from pipeline.runtime import compile_graph
from pipeline.runtime.cuda_streams import CudaOrder, OrderedGuard
from pipeline.runtime.recording import RecordingDevice

CASES: Final = {
    "MLP, one input": (mlp(64), [torch.randn(8, 64)]),
    "transformer, one input of indices": (Classifier(50, 32, 1, 4), [torch.arange(16).view(1, 16)]),
    "decode with a cache, three inputs": (
        Decode(64, 4, 128, 16),
        [torch.randn(1, 1, 64), torch.tensor([1]), torch.zeros(1, 1, 1, 16)],
    ),
}
REPLAYS: Final = 100
ROUNDS: Final = 300


def main() -> None:
    print("| program | µs of a replay: median, least of 300 rounds |\n| --- | --- |")
    for name, (module, inputs) in CASES.items():
        found = measure_host_time(module.eval(), inputs)
        print(f"| {name} | {statistics.median(found):.2f}, {min(found):.2f} |")


def measure_host_time(module: nn.Module, inputs: list[torch.Tensor]) -> list[float]:
    """Microseconds of one replay, by round."""
    device = RecordingDevice(2**24)
    graph = graph_of(module, inputs)
    program = compile_graph(graph, weights_of(graph, module), device=device)
    feed = feed_of(graph, [device.copy_in(tensor) for tensor in inputs])
    empty(program.capture(feed))
    rounds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for _ in range(REPLAYS):
            program.replay(feed, copy=False)
        rounds.append((time.perf_counter() - begun) / REPLAYS * 1e6)
    return rounds


def empty(capture: Any) -> None:
    """Let the replays of `capture` launch and copy nothing."""
    capture._guards = [GuardWithoutDevice(SameStream(), 0)]
    capture._parts = tuple(NoLaunch() for _ in capture._parts)
    capture._copied = tuple((name, type) for name, _ in capture._copied)
    if capture.flags is not None:
        capture.flags._late = NoLook()


class GuardWithoutDevice(OrderedGuard):
    """With a call of C in the place of torch's two, which ask the driver nothing either."""

    def __enter__(self) -> None:
        self._before = min(self._index, 0)
        self._order.enter()
        self._guard.__enter__()


class SameStream(CudaOrder):
    """The stream is that of the launches before, as a rule."""

    def __init__(self) -> None:
        self._index, self._raw = 0, 7

    def enter(self) -> None:
        if max(7, self._index) != self._raw:
            raise AssertionError("another stream")


class NoLaunch:
    begun = 0

    def replay(self) -> None: ...


class NoLook:
    def start(self, *, at_once: bool = False) -> None: ...

    def poll(self) -> None: ...


if __name__ == "__main__":
    main()
