"""Where the memory of a plan lies, and what slots, states, captures and kernels ask of that place.

A `Device` allocates, shows a part of its memory as a tensor, brings tensors to itself, and waits for what was launched
there. A device with streams also says on which of them a program runs, and records launches as a graph. Only this file,
`cuda_streams.py`, and `recording.py` for the device of the tests, know how a kind of device does that.

No program has run on a CUDA device yet: `CudaDevice` is untested there. The rules that it has to keep are proven on
`recording.RecordingDevice`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from subprocess import CalledProcessError
from typing import ClassVar, Final, Protocol

import torch

from passes.graph.traversal import pause_collector
from passes.worker.platforms import memory_limit
from pipeline.errors import InternalError, Unsupported
from pipeline.ir.graph import Graph, TensorSpec, devices_of
from pipeline.planning.arena import ALIGNMENT
from pipeline.runtime.cuda_streams import CudaLateValue, CudaOrder, CudaPool, OrderedGuard, capture_into
from pipeline.runtime.graph_draws import RECORDING, DrawingGraph, standing_in
from pipeline.runtime.tensors import torch_dtype, with_strides
from pipeline.runtime.torch_state import DispatchGuard, make_guard

Launches = Sequence[Callable[[], object]]


class RecordedGraph(Protocol):
    """Launches that a device recorded as one graph."""

    def replay(self) -> None:
        """Launch all of them on the current stream."""
        ...


class LateValue(Protocol):
    """A tensor of a device to which launches add, and which the host takes without waiting for the device."""

    def start(self, *, at_once: bool = False) -> None:
        """Launch a copy of the tensor to the host, and then zeros into it, so that nothing is lost that later launches
        add; unless a copy is under way, or `at_once` is not said and the last one was just now."""
        ...

    def poll(self) -> torch.Tensor | None:
        """The copy, once it is there; then None until the next `start`."""
        ...


class StreamOrder(Protocol):
    """The order of launches on the memory of one sequence of runs."""

    def enter(self) -> None:
        """Let what is launched next wait for what was launched before, also on another stream."""
        ...

    def keep(self, memory: Iterable[torch.Tensor]) -> None:
        """Keep these bytes allocated until the launches that use them are done, on any stream."""
        ...


class HostOrder:
    """The launches of a CPU are in order by themselves."""

    def enter(self) -> None: ...

    def keep(self, memory: Iterable[torch.Tensor]) -> None: ...


class Device(ABC):
    """One device. `name` is that of plans (`cuda:0`), `kind` that of the table of obstacles, and `place` where torch
    makes the tensors."""

    recorder: ClassVar[str]
    """The key of its recorder in `capture.recorders.RECORDERS`."""
    is_host: ClassVar[bool] = False
    """Whether kernels of oneDNN, numpy and our C++ can read its memory."""

    def __init__(self, name: str, place: str, alignment: int) -> None:
        self.name, self.kind, self.place, self.alignment = name, name.partition(":")[0], torch.device(place), alignment

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @abstractmethod
    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies here."""

    @abstractmethod
    def limit(self) -> int:
        """The bytes that this process may have here."""

    @abstractmethod
    def slice_bytes(self, memory: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """The bytes [first, last) of `memory` (uint8) as a storage of their own, which keeps the memory alive."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """`nbytes` bytes (uint8), with whatever is in them.

        Raises:
            RuntimeError: torch's allocator has no more.
        """
        return torch.empty(nbytes, dtype=torch.uint8, device=self.place)

    def empty(self, sizes: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor with these strides, in elements, or contiguous (None)."""
        if strides is None:
            return torch.empty(sizes, dtype=dtype, device=self.place)
        return torch.empty_strided(sizes, strides, dtype=dtype, device=self.place)

    def view(
        self, memory: torch.Tensor, offset: int, spec: TensorSpec, strides: Sequence[int] | None = None
    ) -> torch.Tensor:
        """A tensor of `spec` whose first element lies at byte `offset` of `memory` (uint8), on a storage of its own.

        Such a storage cannot grow: an operator that resizes its result fails and does not write over other values.

        Raises:
            InternalError: kernels of this device do not read at that offset; the plan was made for another one.
        """
        if offset % self.alignment:
            raise InternalError(
                f"byte {offset} of the arena is no multiple of {self.alignment}, as kernels of {self.name!r} expect"
            )
        dtype = torch_dtype(spec.dtype)
        if not spec.numel:
            return self.empty(spec.sizes, None, dtype)
        extent = (
            spec.numel
            if strides is None
            else 1 + sum((size - 1) * stride for size, stride in zip(spec.sizes, strides, strict=True))
        )
        part = self.slice_bytes(memory, offset, offset + extent * dtype.itemsize).view(dtype)
        return part.view(spec.sizes) if strides is None else part.as_strided(spec.sizes, strides)

    def copy_in(self, tensor: torch.Tensor, strides: Sequence[int] | None = None) -> torch.Tensor:
        """`tensor` here and with these strides, in elements, or contiguous (None); copied only where it is not so.

        The host does not wait for a copy of pinned memory, so the caller must not write there before the copy is done.
        """
        return with_strides(tensor.detach().to(self.place, non_blocking=not self.is_host), strides)

    def as_source(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, of more than a few KiB, or a copy of it that the device reads while the host goes on."""
        return tensor

    def pin(self, tensor: torch.Tensor) -> None:  # noqa: B027 - torch can do it on the CPU only
        """Let torch refuse to free or to move the storage of a tensor that lies here, where torch can."""

    def synchronize(self) -> None:  # noqa: B027 - a launch on the CPU is done when it returns
        """Wait until everything that was launched is done."""

    def generator(self, seed: int) -> torch.Generator:
        """A new generator that begins at `seed`."""
        return torch.Generator(self.place).manual_seed(seed)

    @property
    def default_generator(self) -> torch.Generator:
        """That from which torch draws on this device where it is given none."""
        return torch.default_generator

    @contextmanager
    def fork_random(self, state: torch.Tensor | None) -> Iterator[None]:
        """Let torch draw random values from a given state; afterwards the generators of the device and of the host are
        as they were.

        Args:
            state: what `default_generator.get_state()` gave, bytes as uint8; with None the generators go on from where
                they are.
        """
        generator = self.default_generator
        before = generator.get_state()
        try:
            with torch.random.fork_rng(devices=[]):
                if state is not None:
                    generator.set_state(state)
                yield
        finally:
            generator.set_state(before)

    def scope(self) -> AbstractContextManager[object]:
        """Entered while a program of this device is bound and run."""
        return NO_SCOPE

    def order(self) -> StreamOrder:
        """A new order of launches."""
        return HostOrder()

    def guard(self, order: StreamOrder) -> DispatchGuard:
        """What is entered around each replay; see `make_guard`."""
        return make_guard()

    def late_value(self, tensor: torch.Tensor) -> LateValue:
        """`tensor`, to be taken without waiting for the device."""
        raise NotImplementedError(f"{self.name} launches nothing that the host does not wait for")

    def side_stream(self) -> AbstractContextManager[object]:
        """A stream for warm-ups, which waits for the current one; afterwards the current stream waits for it."""
        return NO_SCOPE

    def new_pool(self) -> object:
        """A pool of memory for all graphs of one session."""
        raise NotImplementedError(f"{self.name} records no graphs")

    def pool_bytes(self, pool: object) -> int:
        """Bytes that a pool has taken from the device."""
        return 0

    def is_recording(self) -> bool:
        """Whether this thread records a graph now."""
        return False

    def record(
        self, launches: Launches, pool: object, generators: Sequence[torch.Generator], *, draws: bool = False
    ) -> RecordedGraph:
        """The launches as one graph, whose memory comes from `pool`; `generators` advance at each replay, and torch's
        default generator where the launches draw from it.

        Raises:
            GraphFailure: a launch cannot be recorded.
        """
        raise NotImplementedError(f"{self.name} records no graphs")


OPERATOR_ERRORS: Final = (RuntimeError, IndexError, ValueError, TypeError, MemoryError)
"""What the operators of torch and numpy raise."""


def launch_errors() -> tuple[type[Exception], ...]:
    """What a launch may raise: an error of an operator or, in a process that has loaded Triton, one of Triton's own or
    of the compiler of C, since Triton compiles a kernel and the code that launches it at the first launch."""
    triton = sys.modules.get("triton.errors")
    return OPERATOR_ERRORS if triton is None else (*OPERATOR_ERRORS, triton.TritonError, CalledProcessError)


class GraphFailure(RuntimeError):
    """Launch number `at` cannot be part of a graph."""

    def __init__(self, at: int, error: Exception) -> None:
        super().__init__(str(error))
        self.at = at


NO_SCOPE: Final = nullcontext()


class CpuDevice(Device):
    recorder = "cpu"
    is_host = True

    def __init__(self) -> None:
        super().__init__("cpu", "cpu", ALIGNMENT)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cpu

    def limit(self) -> int:
        return memory_limit()

    def slice_bytes(self, memory: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """numpy shares the memory, so torch refuses to resize the storage."""
        return torch.from_numpy(memory.numpy()[first:last])

    def pin(self, tensor: torch.Tensor) -> None:
        """As with any tensor whose memory numpy shares: `untyped_storage().resize_(0)` is an error then, where it would
        have left launches with memory that is gone."""
        if tensor.layout is torch.strided:
            torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()  # type: ignore[arg-type]


class StreamDevice(Device):
    """A device that goes on with its launches while the host does, and can record them as graphs."""

    recorder = "graph"

    @abstractmethod
    def wait_for_all(self) -> None:
        """Wait until everything that was launched is done; no thread records meanwhile."""

    @abstractmethod
    def capture_into(
        self, pool: object, generators: Sequence[torch.Generator]
    ) -> AbstractContextManager[RecordedGraph]:
        """A context that records the launches in its block as the graph that it yields."""

    def synchronize(self) -> None:
        with RECORDING:
            self.wait_for_all()

    def record(
        self, launches: Launches, pool: object, generators: Sequence[torch.Generator], *, draws: bool = False
    ) -> RecordedGraph:
        at, own, default = -1, self.generator(0), self.default_generator
        try:
            # CUDA refuses to destroy a graph while the same thread records another, and torch 2.9 collects none before
            with RECORDING, pause_collector(), standing_in(own, default), self.capture_into(pool, generators) as graph:
                for at, launch in enumerate(launches):  # noqa: B007 - read where a launch fails
                    launch()
        except launch_errors() as error:
            raise GraphFailure(max(at, 0), error) from error
        return DrawingGraph(graph.replay, own, default) if draws else graph


class CudaDevice(StreamDevice):
    """A CUDA device by its number; untested on a GPU."""

    def __init__(self, index: int) -> None:
        super().__init__(f"cuda:{index}", f"cuda:{index}", CUDA_ALIGNMENT)
        self._index = index

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda and tensor.get_device() == self._index

    def limit(self) -> int:
        """What is free, and what torch's allocator holds without using it."""
        unused = torch.cuda.memory_reserved(self._index) - torch.cuda.memory_allocated(self._index)
        return torch.cuda.mem_get_info(self._index)[0] + unused

    def slice_bytes(self, memory: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """A tensor that comes by DLPack has a storage of its own, which torch cannot resize."""
        return torch.from_dlpack(memory[first:last])

    def as_source(self, tensor: torch.Tensor) -> torch.Tensor:
        """In pinned memory: CUDA copies more than 64 KiB of any other memory only after all launches of the stream, and
        the host waits. torch gives the memory to nobody before the copy is done."""
        return tensor.pin_memory() if tensor.is_cpu else tensor

    def wait_for_all(self) -> None:
        torch.cuda.synchronize(self._index)

    @property
    def default_generator(self) -> torch.Generator:
        torch.cuda.init()
        return torch.cuda.default_generators[self._index]

    def scope(self) -> AbstractContextManager[object]:
        return NO_SCOPE if torch.cuda.current_device() == self._index else torch.cuda.device(self._index)

    def order(self) -> StreamOrder:
        return CudaOrder(self._index)

    def guard(self, order: StreamOrder) -> DispatchGuard:
        assert isinstance(order, CudaOrder)
        return OrderedGuard(order, self._index)

    def late_value(self, tensor: torch.Tensor) -> LateValue:
        return CudaLateValue(tensor)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        with self.scope():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                yield
            torch.cuda.current_stream().wait_stream(side)
            side.synchronize()

    def new_pool(self) -> object:
        return CudaPool(torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._index))

    def pool_bytes(self, pool: object) -> int:
        assert isinstance(pool, CudaPool)
        segments = torch.cuda.memory_snapshot(pool.handle, include_traces=False)
        return sum(int(segment["total_size"]) for segment in segments)

    def is_recording(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def capture_into(self, pool: object, generators: Sequence[torch.Generator]) -> Iterator[RecordedGraph]:
        """In the capture mode of one thread, so that other threads may use the device meanwhile."""
        assert isinstance(pool, CudaPool)
        with self.scope():  # torch puts what a generator shares with graphs on the current device
            graph = torch.cuda.CUDAGraph()
            for generator in generators:
                graph.register_generator_state(generator)
            with capture_into(graph, pool):
                yield graph


CPU: Final = CpuDevice()

CUDA_ALIGNMENT: Final = 256

TARGET: Final[ContextVar[Device]] = ContextVar("TARGET", default=CPU)
"""The device of the program that is being bound."""


def find_device(device: Device | torch.device | str) -> Device:
    """The device of this name: `cpu`, `cuda` (the current one) or `cuda:1`.

    Raises:
        Unsupported: no such device on this machine, or of a kind that this release has no kernels for.
    """
    if isinstance(device, Device):
        return device
    kind, _, number = str(device).partition(":")
    if str(device) == CPU.name:
        return CPU
    if kind != "cuda" or (number and not number.isdecimal()):
        raise Unsupported(
            f"device {str(device)!r}: this release has kernels for cpu and cuda; give cpu, cuda or cuda:0"
        )
    if not torch.cuda.is_available():
        without = "" if torch.version.cuda else "is a build without CUDA, and "
        raise Unsupported(
            f"device {str(device)!r}: torch {torch.__version__} {without}sees no CUDA device on this machine; take a "
            "machine with an NVIDIA GPU and its driver, and pip install 'onnxline[cuda]', or the device cpu"
        )
    index, count = int(number) if number else torch.cuda.current_device(), torch.cuda.device_count()
    if index >= count:
        raise Unsupported(f"device {str(device)!r}: this machine has {count} CUDA devices, numbered from cuda:0")
    return CudaDevice(index)


def device_of(graph: Graph) -> Device:
    """The device of all values of `graph`.

    Raises:
        Unsupported: values on several devices, or on one that is not there (see `find_device`).
    """
    names = devices_of(graph)
    if len(names) > 1:
        raise Unsupported(
            f"graph {graph.name!r} has values on {', '.join(names)}, and a plan runs on one device: move it, by "
            "compile_graph(graph, device=…)"
        )
    return find_device(names[0]) if names else CPU
