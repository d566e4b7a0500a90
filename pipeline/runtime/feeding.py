"""How a tensor of the feed reaches its slot: small inputs are copied, large ones and weights are pointed at.

A copy of a few KiB costs less than pointing operands at other memory, and a copy of a large tensor would cost more: a
second KV cache where one is fed.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from pipeline.planning import FeedEntry
from pipeline.runtime.devices import Device
from pipeline.runtime.operands import SlotPointer
from pipeline.runtime.slots import bind_one
from pipeline.runtime.tensors import is_functional, torch_dtype

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
        self._entry, self._is_here, self._buffer = entry, device.holds, buffer
        self._shape, self._dtype = buffer.shape, buffer.dtype

    def accept(self, given: Given) -> torch.Tensor:
        if type(given) in PLAIN and given.dtype is self._dtype and given.shape == self._shape and self._is_here(given):  # type: ignore[union-attr]
            return given  # type: ignore[return-value]
        return bind_one(self._entry, given)

    def write(self, tensor: torch.Tensor) -> None:
        self._buffer.copy_(tensor)

    def release(self) -> None: ...


class PointedSlot:
    """An input or weight that is read where the caller has it.

    With `stays`, as weights do, it is shown until another tensor is fed. `data_ptr` identifies a tensor while the slot
    holds it.
    """

    def __init__(self, entry: FeedEntry, device: Device, pointer: SlotPointer, *, stays: bool) -> None:
        self.name = entry.name
        self._entry, self._is_here, self._pointer, self._stays = entry, device.holds, pointer, stays
        self._shape, self._dtype = torch.Size(entry.spec.sizes), torch_dtype(entry.spec.dtype)
        self._address: int | None = None
        self._held: torch.Tensor | None = None

    def accept(self, given: Given) -> torch.Tensor:
        held = self._held
        if held is not None and given is held and held.data_ptr() == self._address and held.shape == self._shape:
            return held
        if type(given) in PLAIN and self._is_shown_as_it_is(given):  # type: ignore[arg-type]
            return given  # type: ignore[return-value]
        return bind_one(self._entry, given)

    def _is_shown_as_it_is(self, tensor: torch.Tensor) -> bool:
        strides = self._entry.strides
        return (
            tensor.dtype is self._dtype
            and tensor.shape == self._shape
            and self._is_here(tensor)
            and (tensor.is_contiguous() if strides is None else tensor.stride() == strides)
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
