"""How a tensor of the feed reaches its slot: small inputs are copied, large ones and weights are pointed at.

A copy of a few KiB costs less than pointing operands at other memory; a copy of a large tensor would cost more, such as
a second KV cache where one is fed. A launch is data, a `functools.partial` of a function with its arguments, so its
operands can be listed: all tensors that show a slot are pointed at the new memory, and no kernel is bound again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType
from typing import Protocol

import numpy as np
import torch

from pipeline.errors import InternalError
from pipeline.planning import FeedEntry
from pipeline.runtime.devices import Device
from pipeline.runtime.slots import accept_tensor
from pipeline.runtime.tensors import is_functional, storage_id, torch_dtype


def operands(launch: object) -> Iterator[torch.Tensor]:
    """Every strided tensor that `launch` holds, in its function, its arguments and their parts.

    Raises:
        InternalError: a function holds a tensor in a closure, where nothing can point it at other memory.
    """
    match launch:
        case torch.Tensor():
            if launch.layout is torch.strided:  # weights packed by oneDNN have no storage, and never move
                yield launch
        case partial():
            for part in (launch.func, *launch.args, *launch.keywords.values()):
                yield from operands(part)
        case list() | tuple():
            for part in launch:
                yield from operands(part)
        case Mapping():
            yield from operands([*launch.values()])
        case FunctionType(__closure__=cells):
            if any(isinstance(cell.cell_contents, torch.Tensor) for cell in cells or ()):
                raise InternalError(f"{launch.__qualname__} holds a tensor in a closure; expected a functools.partial")
        case _:
            method_of = getattr(launch, "__self__", None)  # `out.copy_`
            if isinstance(method_of, torch.Tensor):
                yield method_of


def tensors_by_storage(tensors: Iterable[torch.Tensor], storages: Collection[int]) -> dict[int, list[torch.Tensor]]:
    """The different tensors on each of `storages`, which `storage_id` numbers."""
    found: dict[int, dict[int, torch.Tensor]] = {storage: {} for storage in storages}
    for tensor in tensors:
        on_storage = found.get(storage_id(tensor))
        if on_storage is not None:
            on_storage[id(tensor)] = tensor
    return {storage: list(by_id.values()) for storage, by_id in found.items()}


class SlotPointer:
    """All tensors of a context that show one slot.

    `home` is memory of the context, where the slot starts and returns to. All of `tensors` lie on its storage.
    """

    def __init__(self, home: torch.Tensor, tensors: Iterable[torch.Tensor]) -> None:
        self.home = home
        self._shown = [(tensor, tensor.storage_offset(), tensor.size(), tensor.stride()) for tensor in tensors]

    def point_at(self, memory: torch.Tensor) -> None:
        """Show the elements of `memory`, which has the home's shape, strides and dtype."""
        storage, start = memory.untyped_storage(), memory.storage_offset() * memory.element_size()
        for tensor, offset, sizes, strides in self._shown:
            tensor.set_(storage, start // tensor.element_size() + offset, sizes, strides)  # type: ignore[arg-type]

    def point_home(self) -> None:
        self.point_at(self.home)


LARGE = 2**16
"""Bytes from which a copy costs more than pointing operands at the tensor."""

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types that are only their elements; other subclasses of a tensor may hold anything."""

Given = torch.Tensor | np.ndarray


class FedSlot(Protocol):
    """One entry of the feed signature."""

    name: str

    def accept(self, given: Given) -> torch.Tensor:
        """`given` as a tensor that `write` takes.

        Raises:
            UsageError: another shape, dtype or device than the signature has.
        """
        ...

    def write(self, tensor: torch.Tensor) -> None:
        """Let the slot show the elements of an accepted tensor."""
        ...

    def release(self) -> None:
        """After a run: drop what the next run brings anew."""
        ...


class CopiedSlot:
    """An input that is copied into a buffer of the context."""

    def __init__(self, entry: FeedEntry, device: Device, buffer: torch.Tensor) -> None:
        self.name = entry.name
        self._entry, self._device, self._is_here, self._buffer = entry, device, device.holds, buffer
        self._shape, self._dtype = buffer.shape, buffer.dtype

    def accept(self, given: Given) -> torch.Tensor:
        if type(given) in PLAIN and given.dtype is self._dtype and given.shape == self._shape and self._is_here(given):  # type: ignore[union-attr]
            return given  # type: ignore[return-value]
        return accept_tensor(self._entry, given, self._device)

    def write(self, tensor: torch.Tensor) -> None:
        self._buffer.copy_(tensor, non_blocking=True)

    def release(self) -> None: ...


class PointedSlot:
    """An input or weight that is read where the caller has it.

    With `stays`, as weights do, it is shown until another tensor is fed. `data_ptr` identifies a tensor while the slot
    holds it.
    """

    def __init__(self, entry: FeedEntry, device: Device, pointer: SlotPointer, *, stays: bool) -> None:
        self.name = entry.name
        self._entry, self._device, self._is_here = entry, device, device.holds
        self._pointer, self._stays = pointer, stays
        self._shape, self._dtype = torch.Size(entry.spec.sizes), torch_dtype(entry.spec.dtype)
        self._address: int | None = None
        self._held: torch.Tensor | None = None

    def accept(self, given: Given) -> torch.Tensor:
        held = self._held
        if held is not None and given is held and held.data_ptr() == self._address and self._has_form(held):
            return held
        if type(given) in PLAIN and self._is_shown_as_it_is(given):  # type: ignore[arg-type]
            return given  # type: ignore[return-value]
        accepted = accept_tensor(self._entry, given, self._device)
        return self._device.copy_in(self._device.as_source(accepted), self._entry.strides)

    def _has_form(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the dtype, the shape and the strides of the entry; its owner may change all in place."""
        strides = self._entry.strides
        has_strides = tensor.is_contiguous() if strides is None else tensor.stride() == strides
        return has_strides and tensor.shape == self._shape and tensor.dtype is self._dtype

    def _is_shown_as_it_is(self, tensor: torch.Tensor) -> bool:
        return (
            self._has_form(tensor)
            and self._is_here(tensor)
            and not tensor.is_conj()
            and not tensor.is_neg()
            and not is_functional(tensor)
        )

    def write(self, tensor: torch.Tensor) -> None:
        address = tensor.data_ptr()
        if address != self._address:
            self._address, self._held = None, None  # a half written pointer shows nothing
            self._pointer.point_at(tensor)
            self._address = address
        self._held = tensor if self._stays else None

    def release(self) -> None:
        if not self._stays and self._address is not None:
            self._address = None
            self._pointer.point_home()
