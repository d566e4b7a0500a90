"""Where the memory of a plan lies, and what slots, states, captures and kernels ask of that place.

A `Device` allocates, shows a part of its memory as a tensor, brings tensors to itself and waits for what it was given
to do. Only this file knows how a kind of device does that, so kernels for another device come in by a row of `DEVICES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

import torch

from passes.worker.platforms import memory_limit
from pipeline.errors import InternalError, Unsupported
from pipeline.ir.graph import Graph, TensorSpec
from pipeline.planning import ExecutionPlan
from pipeline.planning.arena import ALIGNMENT
from pipeline.runtime.tensors import torch_dtype, with_strides


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device.

    Args:
        name: `torch.device.type`.
        alignment: bytes; kernels read at multiples of it, and so offsets in the arena have to be multiples.
        holds: whether a tensor lies here.
        limit: the bytes that this process may have here.
        cut: the bytes [first, last) of a tensor of bytes as a storage of their own.
        pin: let torch refuse to free or to move the storage of a tensor that lies here.
        synchronize: wait until everything that was launched is done.
        has_kernels: whether this release has kernels for it.
    """

    name: str
    alignment: int
    holds: Callable[[torch.Tensor], bool]
    limit: Callable[[], int]
    cut: Callable[[torch.Tensor, int, int], torch.Tensor]
    pin: Callable[[torch.Tensor], object]
    synchronize: Callable[[], object]
    has_kernels: bool

    def allocate(self, nbytes: int) -> torch.Tensor:
        """`nbytes` bytes (uint8), with whatever is in them.

        Raises:
            RuntimeError: torch's allocator has no more.
        """
        return torch.empty(nbytes, dtype=torch.uint8, device=self.name)

    def empty(self, sizes: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor with these strides, in elements, or contiguous (None)."""
        if strides is None:
            return torch.empty(sizes, dtype=dtype, device=self.name)
        return torch.empty_strided(sizes, strides, dtype=dtype, device=self.name)

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
        part = self.cut(memory, offset, offset + extent * dtype.itemsize).view(dtype)
        return part.view(spec.sizes) if strides is None else part.as_strided(spec.sizes, strides)

    def copy_in(self, tensor: torch.Tensor, strides: Sequence[int] | None = None) -> torch.Tensor:
        """`tensor` here and with these strides, in elements, or contiguous (None); copied only where it is not so."""
        return with_strides(tensor.detach().to(self.name), strides)

    def generator(self, seed: int) -> torch.Generator:
        """A new generator that begins at `seed`."""
        return torch.Generator(self.name).manual_seed(seed)


def _cut_cpu(memory: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """numpy shares the memory, so torch refuses to resize the storage."""
    return torch.from_numpy(memory.numpy()[first:last])


def _pin_cpu(tensor: torch.Tensor) -> None:
    """As with any tensor whose memory numpy shares: `untyped_storage().resize_(0)` is an error then, where it would
    have left launches with memory that is gone."""
    if tensor.layout is torch.strided:
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()  # type: ignore[arg-type]


def _cut_cuda(memory: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """All parts share one storage: torch has no way to cut one."""
    return memory[first:last]


CPU: Final = Device(
    "cpu", ALIGNMENT, attrgetter("is_cpu"), memory_limit, _cut_cpu, _pin_cpu, lambda: None, has_kernels=True
)

DEVICES: Final[Mapping[str, Device]] = {
    "cpu": CPU,
    "cuda": Device(
        "cuda",
        256,
        attrgetter("is_cuda"),
        lambda: torch.cuda.mem_get_info()[0],
        _cut_cuda,
        lambda _: None,
        torch.cuda.synchronize,
        has_kernels=False,
    ),
}
"""By `torch.device.type`. No plan was run on a CUDA device yet."""


def device_at(tensor: torch.Tensor) -> Device:
    """The device on which `tensor` lies."""
    return DEVICES[tensor.device.type]


def alignment_of(graph: Graph) -> int:
    """The alignment of a plan of `graph`: the largest of the devices of its values."""
    kinds = {torch.device(name).type for name in {value.spec.device for value in graph.values}}
    return max((DEVICES.get(kind, CPU).alignment for kind in kinds), default=CPU.alignment)


def device_of(plan: ExecutionPlan) -> Device:
    """The device of all values of `plan`.

    Raises:
        Unsupported: a value is on a device that this release has no kernels for.
    """
    found = CPU
    for slot in plan.slots:
        device = DEVICES.get(torch.device(slot.spec.device).type)
        if device is None or not device.has_kernels:
            raise Unsupported(
                f"{slot.name!r} is on device {slot.spec.device!r}; this release has CPU kernels only: "
                "import the model for device 'cpu'"
            )
        found = device
    return found
