"""A device on CPU memory that keeps the rules of a CUDA capture, so that they are proven where there is no GPU.

It has what a CUDA device has for a runtime: memory of its own with private pools, streams, and graphs. A graph is a
list of calls of operators on raw addresses. What is recorded changes no memory; a replay calls the operators again.

A capture fails, as on CUDA, where a launch reads a value on the host, copies from pageable memory, mixes memory of the
host with memory of the device, draws from a generator that the graph does not know, or waits for the device; where a
graph is destroyed meanwhile; and where another thread waits for the device, or begins a capture, which waits. A replay
fails where it allocates, where it touches memory that was freed, and where two streams touch the same memory in no
order. Each thread has a current stream and a capture.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeline.runtime.devices import CUDA_ALIGNMENT, LateValue, StreamDevice, StreamOrder
from pipeline.runtime.recording_memory import DeviceBlock, DeviceGenerator, DeviceMemory, Pool, RecordedCall, writes_of
from pipeline.runtime.torch_state import DispatchGuard, make_guard

Clock = Counter[int]
"""Stream → how many of its launches are known to be done."""

HOST_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class ThreadState(threading.local):
    """What each thread has for itself on a device."""

    stream = 0
    """The current stream."""
    capture: GraphRecord | None = None
    """The graph that launches are recorded as."""
    is_replaying = False
    depth = 0
    """How many operators on operands of the device are being decomposed; their results are on the device too."""


class RecordingDevice(StreamDevice):
    """A device for tests, and for a look at what a CUDA graph would hold; plans name it `cuda:0`.

    Args:
        nbytes: the memory of the device; only what is used is taken from this machine.
    """

    def __init__(self, nbytes: int = 2**30) -> None:
        super().__init__("cuda:0", "cpu:0", CUDA_ALIGNMENT)
        self.memory = DeviceMemory(nbytes)
        self.thread = ThreadState()
        self._clocks: dict[int, Clock] = {}
        self._done = Clock()
        self._sides = count(-1, -1)
        """Streams of warm-ups."""
        self._captures = list[GraphRecord]()
        """The captures that have begun and not ended, of all threads."""
        self.synchronizations = 0
        """How often the host waited for the device, also for a number that it reads, and for a copy between the two."""

    def holds(self, tensor: torch.Tensor) -> bool:
        return self.memory.holds(tensor)

    def limit(self) -> int:
        return self.memory.nbytes

    def allocate(self, nbytes: int) -> torch.Tensor:
        if self.thread.is_replaying:
            raise RuntimeError("a replay allocates memory of the device")
        capture = self.thread.capture
        return self.memory.allocate(nbytes, None if capture is None else capture.pool)

    def empty(self, sizes: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype) -> torch.Tensor:
        wanted = torch.empty(sizes, device="meta").stride() if strides is None else tuple(strides)
        span = 0 if 0 in sizes else 1 + sum((size - 1) * step for size, step in zip(sizes, wanted, strict=True))
        return self.allocate(span * dtype.itemsize).view(dtype).as_strided(sizes, wanted)

    def slice_bytes(self, memory: torch.Tensor, first: int, last: int) -> torch.Tensor:
        return torch.from_numpy(memory.numpy()[first:last])

    def copy_in(self, tensor: torch.Tensor, strides: Sequence[int] | None = None) -> torch.Tensor:
        tensor = tensor.detach()
        if self.holds(tensor) and (tensor.is_contiguous() if strides is None else tensor.stride() == tuple(strides)):
            return tensor
        return self.empty(tensor.shape, strides, tensor.dtype).copy_(tensor, non_blocking=True)

    def wait_for_all(self) -> None:
        for capture in self._captures:
            capture.broken_by = "another thread waited for the device"
        if self._captures:
            raise RuntimeError("operation not permitted when stream is capturing: it waits for the device")
        self.synchronizations += 1
        for clock in self._clocks.values():
            self._done |= clock
        self._clocks.clear()

    def generator(self, seed: int) -> torch.Generator:
        return DeviceGenerator().manual_seed(seed)

    @property
    def default_generator(self) -> torch.Generator:
        return self.memory.default_generator

    def scope(self) -> AbstractContextManager[object]:
        return DeviceMode(self)

    def order(self) -> StreamOrder:
        return RecordingOrder(self)

    def guard(self, order: StreamOrder) -> DispatchGuard:
        return RecordingGuard(self, order)

    def late_value(self, tensor: torch.Tensor) -> LateValue:
        return RecordingLateValue(self, tensor)

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """Launch on `stream`, a number, as `torch.cuda.stream` does."""
        before, self.thread.stream = self.thread.stream, stream
        try:
            yield
        finally:
            self.thread.stream = before

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        before, side = self.thread.stream, next(self._sides)
        self.wait(side, before)
        with self.on_stream(side):
            yield
        self.wait(before, side)

    def wait(self, stream: int, other: int) -> None:
        """Let `stream` wait for what was launched on `other` until now."""
        self._clocks[stream] = self._clock(stream) | self._clock(other)

    def new_pool(self) -> object:
        return Pool()

    def pool_bytes(self, pool: object) -> int:
        assert isinstance(pool, Pool)
        return pool.nbytes

    def is_recording(self) -> bool:
        return self.thread.capture is not None

    def drop(self, pool: Pool) -> None:
        """A graph of `pool` is gone."""
        if self.thread.capture is not None:
            self.thread.capture.broken_by = "a graph was destroyed"
        self.memory.drop(pool)

    @contextmanager
    def capture_into(self, pool: object, generators: Sequence[torch.Generator]) -> Iterator[GraphRecord]:
        assert isinstance(pool, Pool)
        self.wait_for_all()  # as torch does before a capture
        graph = GraphRecord(self, pool, generators)
        self.thread.capture = graph
        self._captures.append(graph)
        try:
            with DeviceMode(self):
                yield graph
            if graph.broken_by:
                raise RuntimeError(f"the capture was invalidated: {graph.broken_by}")
        finally:
            self._captures.remove(graph)
            self.thread.capture = None
            graph.undo()

    def touch(self, tensors: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
        """Count a launch of the current stream, and check that it is in order with others on the same memory.

        Args:
            tensors: the tensors that the launch reads or writes.
            written: the tensors that it writes.

        Raises:
            RuntimeError: another stream wrote there, or reads what is written, and nobody waited for it.
        """
        changed = set(map(id, written))
        used = ((self.memory.block_of(tensor), id(tensor) in changed) for tensor in tensors)
        self.touch_blocks((block, changes) for block, changes in used if block is not None)

    def touch_blocks(self, blocks: Iterable[tuple[DeviceBlock, bool]]) -> None:
        """`touch`, of blocks of memory.

        Args:
            blocks: each, and whether the launch writes there.

        Raises:
            RuntimeError: as `touch`.
        """
        stream = self.thread.stream
        clock = self._clock(stream)
        clock[stream] += 1
        for block, changes in blocks:
            before = ([block.written] if block.written else []) + ([*block.read.items()] if changes else [])
            if any(clock[other] < number for other, number in before):
                raise RuntimeError(f"streams race: stream {stream} does not wait for another one that uses the memory")
            if changes:
                block.written, block.read = (stream, clock[stream]), {}
            else:
                block.read[stream] = clock[stream]

    def _clock(self, stream: int) -> Clock:
        return self._clocks.setdefault(stream, Clock(self._done))

    def _refuse_while_capturing(self, does: str) -> None:
        if self.thread.capture is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: it {does}")

    def call(self, mode: DeviceMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operator: a launch, or while a graph is recorded an entry of it. Threads take turns.

        Args:
            mode: the mode that has caught the call.
            func: torch's operator.
            args: its positional arguments.
            kwargs: its arguments by name.
        """
        with self.memory.lock:
            return self._call(mode, func, args, kwargs)

    def _call(self, mode: DeviceMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        here = [leaf for leaf in leaves if self.holds(leaf)]
        is_own = (
            bool(here) or self.thread.depth or kwargs.get("device") == self.place or kwargs.get("generator") is not None
        )
        if not is_own:
            return func(*args, **kwargs)
        if func._can_decompose() and func._schema.name.startswith("aten::"):
            self.thread.depth += 1
            try:
                with mode:
                    found = func.decompose(*args, **kwargs)
            finally:
                self.thread.depth -= 1
            if found is not NotImplemented:
                return found
        if any(tag in func.tags for tag in HOST_TAGS) and func is not torch.ops.aten.index.Tensor:
            self._refuse_while_capturing(f"reads the host ({func})")
            self.synchronizations += 1
        strange = [leaf for leaf in leaves if not self.holds(leaf) and (leaf.dim() or func in COPIES)]
        if strange and func in COPIES:
            self._refuse_while_capturing("copies from pageable memory")
            self.synchronizations += not (kwargs.get("non_blocking") or True in args[2:])
        elif strange:
            raise RuntimeError(
                f"{func}: expected all tensors on the device, found one of {list(strange[0].shape)} on the host"
            )
        written, capture = writes_of(func, args, kwargs), self.thread.capture
        if capture is not None:
            if getattr(kwargs.get("generator"), "_cdata", None) not in {None, *capture.generators}:
                self._refuse_while_capturing("draws from a generator that the graph does not know")
            capture.remember(written)
        result = func(*args, **kwargs)
        storages = {tensor.untyped_storage().data_ptr() for tensor in here}
        fresh: list[torch.Tensor] = []

        def settle(made: torch.Tensor) -> torch.Tensor:
            if (
                any(made is changed for changed in written)
                or not made.is_cpu
                or made.layout is not torch.strided
                or (made.numel() and made.untyped_storage().data_ptr() in storages)
            ):
                return made
            fresh.append(self.empty(made.shape, made.stride(), made.dtype).copy_(made))
            return fresh[-1]

        result = tree_map_only(torch.Tensor, settle, result)
        if written or fresh:
            self.touch([*here, *fresh], [*written, *fresh])
            if capture is not None:
                capture.add(func, args, kwargs, written, fresh)
        return result


class DeviceMode(TorchDispatchMode):
    """What torch calls is done on the device where its operands are there, or where it says so."""

    def __init__(self, device: RecordingDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _disable_current_modes():  # scopes are nested, and a call counts once
            return self._device.call(self, func, args, kwargs or {})


class GraphRecord:
    """The calls of one graph, on memory that it does not own."""

    def __init__(self, device: RecordingDevice, pool: Pool, generators: Sequence[torch.Generator]) -> None:
        self._device, self.pool = device, pool
        self.generators = {generator._cdata for generator in generators}  # type: ignore[attr-defined]
        self._random = device.memory.default_generator.memory
        self._calls: list[RecordedCall] = []
        self._before = dict[int, tuple[DeviceBlock, bytes]]()
        """By first byte, the blocks that recorded launches wrote to, as they were."""
        self.broken_by = ""
        """What somebody did while this was recorded that CUDA does not permit."""
        if pool.is_gone:
            raise RuntimeError("internal assert failed: use_count > 0, since the last graph of this pool is gone")
        pool.graphs += 1
        weakref.finalize(self, device.drop, pool)

    def __len__(self) -> int:
        return len(self._calls)

    def remember(self, written: Sequence[torch.Tensor]) -> None:
        """Keep what these tensors hold: CUDA records launches without doing them."""
        for block in map(self._device.memory.block_of, written):
            if block is not None and block.first not in self._before:
                self._before[block.first] = block, self._device.memory.read(block)

    def undo(self) -> None:
        """Restore the memory that recorded launches wrote to: a capture changes no memory."""
        for block, content in self._before.values():
            self._device.memory.write(block, content)
        self._before.clear()

    def add(
        self, func: Any, args: Any, kwargs: Any, written: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]
    ) -> None:
        raw = {
            id(leaf): self._device.memory.raw(leaf)
            for leaf in (*tree_leaves((args, kwargs)), *fresh)
            if isinstance(leaf, torch.Tensor)
        }
        args, kwargs = tree_map_only(torch.Tensor, lambda leaf: raw[id(leaf)], (args, kwargs))
        changed = {id(tensor) for tensor in (*written, *fresh)}
        read = tuple(tensor for key, tensor in raw.items() if key not in changed)
        self._calls.append(
            RecordedCall(
                func,
                args,
                kwargs,
                read,
                tuple(raw[id(tensor)] for tensor in written),
                tuple(raw[id(tensor)] for tensor in fresh),
            )
        )

    def replay(self) -> None:
        """Call the operators again, on the current stream.

        Raises:
            RuntimeError: one of the rules of this module is broken.
        """
        thread, own = self._device.thread, list[range]()
        thread.is_replaying = True
        try:
            with _disable_current_modes(), self._device.memory.lock:  # a replay calls no Python on CUDA
                self._device.touch_blocks([(self._random.block, True)])
                with self._random.drawing():
                    self._call_all(own)
        finally:
            thread.is_replaying = False

    def _call_all(self, own: list[range]) -> None:
        for call in self._calls:
            self._refuse_freed(call.read, own)
            self._refuse_freed((*call.written, *call.fresh), None)
            self._device.touch((*call.read, *call.written, *call.fresh), (*call.written, *call.fresh))
            result = call.func(*call.args, **call.kwargs)
            if call.fresh:
                kept = {id(tensor) for tensor in call.written}
                leaves = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
                made = [leaf for leaf in leaves if id(leaf) not in kept]
                for target, source in zip(call.fresh, made, strict=True):
                    target.copy_(source)
            storages = (tensor.untyped_storage() for tensor in (*call.written, *call.fresh))
            own += [range(found.data_ptr(), found.data_ptr() + found.nbytes()) for found in storages]

    def _refuse_freed(self, tensors: Sequence[torch.Tensor], own: list[range] | None) -> None:
        """`own`: addresses that this replay has written, where what is read has to begin."""
        for tensor in tensors:
            block = self._device.memory.block_of(tensor)
            if block is None or block.is_live:
                continue
            is_own = own is None or any(tensor.data_ptr() in span for span in own)
            if block.pool is not self.pool or not is_own:
                raise RuntimeError("a replay touches memory that was freed")


class RecordingOrder(StreamOrder):
    """`kept`: what a device with streams would not give to others while launches use it."""

    def __init__(self, device: RecordingDevice) -> None:
        self._device, self._last = device, device.thread.stream
        self.kept = WeakValueDictionary[int, torch.Tensor]()

    def keep(self, memory: Iterable[torch.Tensor]) -> None:
        self.kept.update((id(tensor), tensor) for tensor in memory)

    def enter(self) -> None:
        stream = self._device.thread.stream
        if stream != self._last:
            self._device.wait(stream, self._last)
            self._last = stream


class RecordingGuard:
    """As the guard of a CUDA device, with the device's rules for what is launched inside."""

    def __init__(self, device: RecordingDevice, order: StreamOrder) -> None:
        self._order, self._parts = order, (make_guard(), DeviceMode(device))

    def __enter__(self) -> None:
        self._order.enter()
        for part in self._parts:
            part.__enter__()

    def __exit__(self, *error: Any) -> None:
        for part in reversed(self._parts):
            part.__exit__(*error)


class RecordingLateValue:
    """A copy on the host, which the first `poll` after `start` returns."""

    def __init__(self, device: RecordingDevice, tensor: torch.Tensor) -> None:
        self._device, self._tensor = device, tensor
        self._copy: torch.Tensor | None = None

    def start(self, *, at_once: bool = False) -> None:
        if self._copy is None:
            self._device.touch((self._tensor,), (self._tensor,))
            with _disable_current_modes():
                self._copy = self._tensor.clone()
                self._tensor.zero_()

    def poll(self) -> torch.Tensor | None:
        found, self._copy = self._copy, None
        return found
