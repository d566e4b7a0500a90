"""What a CUDA device has for streams: the order of launches, guards of replays, looks of the host, captures.

Untested on a GPU; the rules are proven on `recording.RecordingDevice`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

import torch

from pipeline.runtime.tensors import storage_id
from pipeline.runtime.torch_state import make_guard


class CudaOrder:
    """Launches wait for the stream of the launches before them."""

    def __init__(self, index: int) -> None:
        self._index, self._last = index, torch.cuda.current_stream(index)
        self._raw = self._last.cuda_stream
        self._kept = WeakValueDictionary[int, torch.Tensor]()

    def enter(self) -> None:
        if torch._C._cuda_getCurrentRawStream(self._index) != self._raw:
            stream = torch.cuda.current_stream(self._index)
            stream.wait_stream(self._last)
            self._last, self._raw = stream, stream.cuda_stream
            for memory in {storage_id(memory): memory for memory in self._kept.values()}.values():
                memory.record_stream(stream)

    def keep(self, memory: Iterable[torch.Tensor]) -> None:
        self._kept.update((id(tensor), tensor) for tensor in memory)


class OrderedGuard:
    """The guard of the dispatcher. Entering it also orders the launches after those before them, and makes the device
    the current one: Triton launches on the current device, and events are recorded there."""

    def __init__(self, order: CudaOrder, index: int) -> None:
        self._order, self._guard, self._index = order, make_guard(), index
        self._before = index

    def __enter__(self) -> None:
        self._before = exchange_device(self._index)
        self._order.enter()
        self._guard.__enter__()

    def __exit__(self, *error: object) -> None:
        self._guard.__exit__(*error)
        if self._before != self._index:
            exchange_device(self._before)


exchange_device: Final[Callable[[int], int]] = vars(torch.cuda)["_exchange_device"]
"""Make a device the current device; returns the previous device."""


class CudaLateValue:
    """A copy in pinned memory, and an event after it. A look costs a replay as much as all of its other Python, so the
    host looks at most once in `BETWEEN_LOOKS_S`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._host = tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._event, self._is_under_way, self._next = torch.cuda.Event(), False, 0.0

    def start(self, *, at_once: bool = False) -> None:
        if self._is_under_way or not (at_once or time.perf_counter() >= self._next):
            return
        self._next = time.perf_counter() + BETWEEN_LOOKS_S
        self._host.copy_(self._tensor, non_blocking=True)
        self._event.record(torch.cuda.current_stream(self._tensor.device))
        self._tensor.zero_()
        self._is_under_way = True

    def poll(self) -> torch.Tensor | None:
        if not self._is_under_way or not self._event.query():
            return None
        self._is_under_way = False
        return self._host


BETWEEN_LOOKS_S: Final = 0.001
"""The least seconds between two looks."""


@dataclass(frozen=True, slots=True)
class CudaPool:
    """A pool, and the stream on which its graphs are recorded: blocks of a pool are used again on their stream alone,
    and torch's own stream for captures is that of the device which had the first one."""

    handle: tuple[int, int]
    stream: torch.cuda.Stream


@contextmanager
def capture_into(graph: torch.cuda.CUDAGraph, pool: CudaPool) -> Iterator[None]:
    """Record what the current device is given into `graph`; afterwards torch is as before, also where that fails.

    cuBLAS takes its workspace from the pool, and gives it back there: torch keeps one for each stream of a capture, so
    two sessions would share it on two streams, and its pool would stay for ever.

    Raises:
        Exception: what a launch raised, or torch at the end of a record that is none.
    """
    clear_workspaces = vars(torch._C)["_cuda_clearCublasWorkspaces"]
    recording = torch.cuda.graph(graph, pool.handle, pool.stream, capture_error_mode="thread_local")  # type: ignore[arg-type]
    failed: Exception | None = None
    clear_workspaces()
    try:
        with torch.cuda.stream(torch.cuda.current_stream()), recording:  # which leaves its stream where it fails
            try:
                yield
            except Exception as error:
                failed = error
                raise
    except Exception as error:
        with suppress(RuntimeError):  # torch before 2.12 would allocate for the capture for ever
            vars(torch._C)["_cuda_endAllocateToPool"](pool.stream.device_index, pool.handle)
        raise (failed or error) from None
    finally:
        clear_workspaces()
