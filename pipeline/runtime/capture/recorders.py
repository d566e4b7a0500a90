"""Recorders by device: each takes the same launches, and gives something that replays them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import length_hint
from typing import Protocol

import torch

from pipeline.runtime.kernels import Launch

__all__ = ["RECORDERS", "CpuRecorder", "CudaRecorder", "Recorder", "Recording"]


class Recording(Protocol):
    """Launches that were recorded once."""

    begun: int
    """How many of its launches the last replay began, where that one failed."""

    def replay(self) -> None:
        """Run all of them again, on the same operands."""
        ...


class Recorder(Protocol):
    """How one kind of device warms up and records."""

    def warm_up(self, run: Callable[[], None]) -> None:
        """Call `run` until nothing changes any more: storage, library handles, chosen algorithms."""
        ...

    def record(self, launches: Sequence[Launch]) -> Recording:
        """Record launches that were warmed up."""
        ...


class CallLoop:
    """Bound calls, replayed by a loop: kernels and arguments were resolved when they were bound."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        self._launches = tuple(launches)
        self.begun = 0

    def replay(self) -> None:
        rest = iter(self._launches)
        try:
            for launch in rest:
                launch()
        except BaseException:
            self.begun = len(self._launches) - length_hint(rest)
            raise


class CpuRecorder:
    """Records launches as bound calls."""

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def record(self, launches: Sequence[Launch]) -> CallLoop:
        return CallLoop(launches)


class GraphReplay:
    """Launches in a CUDA graph. The launches are kept, since their operands own the memory that the graph points at."""

    def __init__(self, graph: torch.cuda.CUDAGraph, launches: Sequence[Launch]) -> None:
        self._graph, self._launches = graph, tuple(launches)
        self.begun = len(self._launches)

    def replay(self) -> None:
        self._graph.replay()


class CudaRecorder:
    """Records launches inside `torch.cuda.graph`; the graphs of one recorder share one memory pool.

    Not run on a GPU yet: `tests/pipeline/runtime/capture/test_recorders.py` has its test.
    """

    WARM_UPS = 3
    """As many as torch's own `make_graphed_callables` does: cuBLAS and cuDNN choose algorithms in the first ones."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], None]) -> None:
        """On a side stream, as a capture needs it."""
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(self.WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()

    def record(self, launches: Sequence[Launch]) -> GraphReplay:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            for launch in launches:
                launch()
        return GraphReplay(graph, launches)


RECORDERS: Mapping[str, Callable[[], Recorder]] = {"cpu": CpuRecorder, "cuda": CudaRecorder}
"""By `torch.device.type`."""
