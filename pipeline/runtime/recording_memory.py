"""The memory of the recording device: one allocation of this machine, blocks in it, and pools of them; and what is
recorded of a call."""

from __future__ import annotations

import bisect
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from pipeline.runtime.devices import CUDA_ALIGNMENT


@dataclass(eq=False)
class Pool:
    """Memory that only the graphs of one session use; it is given back when the last of them is gone."""

    graphs: int = 0
    is_gone: bool = False
    """Whether the last graph is gone; torch takes no further one into such a pool."""
    free: list[tuple[int, int]] = field(default_factory=list)
    nbytes: int = 0
    """Bytes that the pool has taken from the device."""


@dataclass(eq=False)
class DeviceBlock:
    """The bytes [first, last), allocated once; who wrote and read them last, by (stream, number of the launch)."""

    first: int
    last: int
    pool: Pool | None
    is_live: bool = True
    written: tuple[int, int] | None = None
    read: dict[int, int] = field(default_factory=dict)


class DeviceGenerator(torch.Generator):
    """A generator that has a seed and an offset, as one of CUDA: its state as a number, which belongs to its seed.

    The state has a byte more than that of a generator of the host: on CUDA neither takes the state of the other.
    """

    def get_state(self) -> torch.Tensor:
        return _state_here(super().get_state())

    def set_state(self, new_state: torch.Tensor) -> torch.Generator:
        return super().set_state(_state_of_host(new_state))

    def get_offset(self) -> int:
        return int.from_bytes(self.get_state().numpy().tobytes(), "little")

    def set_offset(self, offset: int) -> torch.Generator:
        state = bytearray(offset.to_bytes(self.get_state().nbytes, "little"))
        seed, found = self.initial_seed(), self.set_state(torch.frombuffer(state, dtype=torch.uint8))
        if self.initial_seed() != seed:
            raise RuntimeError("the offset is that of another seed, with which CUDA would draw other numbers")
        return found


def _state_here(state: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(state, (0, 1))


def _state_of_host(state: torch.Tensor) -> torch.Tensor:
    if state.numel() != torch.default_generator.get_state().numel() + 1:
        raise RuntimeError("the state is that of a generator of the host, which one of CUDA does not take")
    return state[:-1]


class DefaultGenerator(DeviceGenerator):
    """torch's default generator, in whose place another one may stand, as for CUDA's."""

    def __init__(self) -> None:
        self.memory = RandomMemory(DeviceGenerator())
        """Of the graphs that are recorded now; its generator has what is drawn next while another one stands here."""

    def get_state(self) -> torch.Tensor:
        return _state_here(torch.default_generator.get_state())

    def set_state(self, new_state: torch.Tensor) -> torch.Generator:
        return torch.default_generator.set_state(_state_of_host(new_state))

    def initial_seed(self) -> int:
        return torch.default_generator.initial_seed()

    def manual_seed(self, seed: int) -> torch.Generator:
        return torch.default_generator.manual_seed(seed)

    def graphsafe_get_state(self) -> Any:
        return self.memory

    def graphsafe_set_state(self, state: Any) -> torch.Generator:
        self.memory.generator.set_state(self.get_state())
        self.memory = RandomMemory(state) if isinstance(state, DeviceGenerator) else state
        return self.set_state(self.memory.generator.get_state())


@dataclass(eq=False)
class RandomMemory:
    """Where the graphs that know a generator find its seed and its offset: each replay writes them anew."""

    generator: DeviceGenerator
    block: DeviceBlock = field(default_factory=lambda: DeviceBlock(0, 0, None))

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, what is drawn from torch's default generator comes from this one."""
        default, own = torch.default_generator, self.generator
        before = default.get_state()
        default.set_state(_state_of_host(own.get_state()))
        try:
            yield
        finally:
            own.set_state(_state_here(default.get_state()))
            default.set_state(before)


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """An operator on raw addresses. `fresh` is where the results go that the operator allocates."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    read: tuple[torch.Tensor, ...]
    written: tuple[torch.Tensor, ...]
    fresh: tuple[torch.Tensor, ...]


class DeviceMemory:
    """Blocks by their first byte, live ones and freed ones, until another block takes their place."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.default_generator = nbytes, DefaultGenerator()
        unaligned = np.empty(nbytes + CUDA_ALIGNMENT, np.uint8)
        skipped = -unaligned.ctypes.data % CUDA_ALIGNMENT
        self._bytes = unaligned[skipped : skipped + nbytes]
        self._base = self._bytes.ctypes.data
        self._free = [(0, nbytes)]
        self._firsts: list[int] = []
        self._blocks: dict[int, DeviceBlock] = {}
        self.lock = threading.RLock()
        """Held by a thread that computes here, or takes or gives back memory."""

    def holds(self, tensor: torch.Tensor) -> bool:
        at = tensor.untyped_storage().data_ptr() - self._base
        return tensor.is_cpu and (0 <= at < len(self._bytes) or not tensor.untyped_storage().nbytes())

    @property
    def used(self) -> int:
        """Bytes of live tensors, and of the pools of live graphs."""
        return self.nbytes - sum(last - first for first, last in self._free)

    def allocate(self, nbytes: int, pool: Pool | None) -> torch.Tensor:
        """`nbytes` bytes (uint8), of `pool` where it has them."""
        size = max(-(-nbytes // CUDA_ALIGNMENT), 1) * CUDA_ALIGNMENT
        with self.lock:
            first = _take(pool.free, size) if pool else None
            if first is None:
                first = _take(self._free, size)
                if pool is not None:
                    pool.nbytes += size
            if first is None:
                raise RuntimeError(f"CUDA out of memory: {nbytes} bytes of the recording device")
            block = DeviceBlock(first, first + size, pool)
            self._forget(first, first + size)
            bisect.insort(self._firsts, first)
            self._blocks[first] = block
        part = self._bytes[first : first + nbytes]
        weakref.finalize(part, self._release, block)
        return torch.from_numpy(part)

    def block_of(self, tensor: torch.Tensor) -> DeviceBlock | None:
        """The block that `tensor` lies in, also where it was freed; None for memory of the host."""
        if not tensor.numel() or not self.holds(tensor):
            return None
        first = tensor.data_ptr() - self._base
        return self._blocks[self._firsts[bisect.bisect_right(self._firsts, first) - 1]]

    def raw(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` by its address alone: nothing keeps its memory."""
        if self.block_of(tensor) is None:
            return tensor
        first = tensor.data_ptr() - self._base
        span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        memory = torch.from_numpy(self._bytes[first : first + span * tensor.element_size()])
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def drop(self, pool: Pool) -> None:
        """A graph of `pool` is gone."""
        with self.lock:
            pool.graphs -= 1
            if pool.graphs:
                return
            pool.is_gone = True
            for first, last in pool.free:
                _give(self._free, first, last)

    def read(self, block: DeviceBlock) -> bytes:
        return self._bytes[block.first : block.last].tobytes()

    def write(self, block: DeviceBlock, content: bytes) -> None:
        """Put `content` back, unless the memory was given away since."""
        if block.is_live:
            self._bytes[block.first : block.last] = np.frombuffer(content, np.uint8)

    def _release(self, block: DeviceBlock) -> None:
        with self.lock:
            block.is_live = False
            keeps = block.pool is not None and block.pool.graphs
            _give(block.pool.free if keeps and block.pool else self._free, block.first, block.last)

    def _forget(self, first: int, last: int) -> None:
        """Blocks that were freed, in whose place another one is."""
        low, high = bisect.bisect_left(self._firsts, first), bisect.bisect_left(self._firsts, last)
        for known in self._firsts[low:high]:
            del self._blocks[known]
        del self._firsts[low:high]


def _take(free: list[tuple[int, int]], size: int) -> int | None:
    """The first place for `size` bytes, taken out of `free`."""
    for at, (first, last) in enumerate(free):
        if last - first >= size:
            free[at : at + 1] = [(first + size, last)] if last - first > size else []
            return first
    return None


def _give(free: list[tuple[int, int]], first: int, last: int) -> None:
    """Put [first, last) back into `free`, joined with its neighbours."""
    at = bisect.bisect_left(free, (first, last))
    if at < len(free) and free[at][0] == last:
        last = free.pop(at)[1]
    if at and free[at - 1][1] == first:
        first = free.pop(at - 1)[0]
        at -= 1
    free.insert(at, (first, last))


def writes_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that `func` writes to, by its schema."""
    found: list[torch.Tensor] = []
    for at, item in enumerate(func._schema.arguments):
        if item.alias_info is not None and item.alias_info.is_write:
            given = args[at] if at < len(args) else kwargs.get(item.name)
            found += [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    return found
