"""The tensors in a launch, and how to point them at other memory.

A launch is data, a `functools.partial` of a function with its arguments, so its operands can be listed. A slot whose
memory changes from run to run, such as a large input, is then a pointer write: all tensors that show it are pointed at
the new memory, and no kernel is bound again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType

import torch

from pipeline.errors import InternalError


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


def storage_id(tensor: torch.Tensor) -> int:
    """A number for the storage of `tensor`, the same for all its views."""
    return tensor.untyped_storage()._cdata


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
