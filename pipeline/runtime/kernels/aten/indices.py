"""Check indices on the device, before a kernel reads them: an index out of range ends the whole context of CUDA.

A launch clamps the indices first, and the kernel reads the clamped ones. Where that changed any, a flag of the call is
set, which stays set. The host looks at a copy of the flags when the device is done with it, and waits for nothing. So
the error is raised by a later run than the one with the wrong index.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from pipeline.ir import InputRef
from pipeline.runtime.devices import Device
from pipeline.runtime.kernels.aten.call import CallTemplate
from pipeline.runtime.kernels.base import Ins, Launch
from pipeline.runtime.kernels.cuda import has_triton, launch_clamp

SELECTING: Final = """
index_select.default gather.default index_copy.default index_add.default index_fill.int_Scalar index_fill.int_Tensor
scatter.src scatter.value scatter_add.default scatter_reduce.two
"""

INDEXED: Final[Mapping[str, tuple[str, str]]] = {
    "aten.embedding.default": ("indices", "weight"),
    "aten.embedding_dense_backward.default": ("indices", ""),
    **{f"aten.{name}": ("index", "self") for name in SELECTING.split()},
    "aten.nll_loss_forward.default": ("target", "self"),
    "aten.nll_loss_backward.default": ("target", "self"),
}
"""Operator → its indices and the operand that they select from. `index` and `index_put` have a list of indices."""

LISTS: Final = ("aten.index.Tensor", "aten.index_put.default")


class IndexFlags:
    """A flag for each tensor of indices that the launches of one program read."""

    def __init__(self, device: Device, most: int) -> None:
        self.memory = device.empty((most,), None, torch.bool).zero_()
        self.owners: list[int] = []
        """By flag, the index of its call in the plan."""
        self._device, self._late = device, device.late_value(self.memory)

    def new_flag(self, call: int) -> torch.Tensor:
        self.owners.append(call)
        return self.memory[len(self.owners) - 1]

    def start(self) -> None:
        """After launches: look at the flags when the device is done."""
        self._late.start()

    def wait(self) -> None:
        """Wait for the device, so that `poll` knows of everything that was launched before."""
        self._device.synchronize()
        self._late.poll()  # ends a look that began before the last launches; the flags are set still
        self._late.start(at_once=True)
        self._device.synchronize()

    def poll(self) -> int | None:
        """The place of a call that had a wrong index, if the host knows of one by now; each is given once."""
        found = self._late.poll()
        if found is None or not found.any():
            return None
        self.memory.zero_()
        return self.owners[int(found.nonzero()[0])]


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """The call, by its index, that is bound now, and which of its operands never change."""

    flags: IndexFlags
    call: int
    constants: Collection[int]


CURRENT: Final[ContextVar[CheckedCall | None]] = ContextVar("CURRENT", default=None)
"""None on the CPU, where kernels check indices."""


def check_indices(template: CallTemplate, ins: Ins) -> tuple[Sequence[torch.Tensor], list[Launch]]:
    """`ins` with clamped indices, and the launches that clamp them and set flags."""
    current = CURRENT.get()
    if current is None or not (template.kind in INDEXED or template.kind in LISTS):
        return ins, []
    checked, launches = list(ins), list[Launch]()
    for at, low, high, ignored in _ranges(template, ins):
        index = ins[at]
        if at in current.constants and _are_within(index, low, high, ignored):
            continue
        flag = current.flags.new_flag(current.call)
        checked[at] = safe = torch.empty_like(index, memory_format=torch.contiguous_format)
        clamp = launch_clamp(index, safe, flag, low, high, ignored) if index.is_cuda and has_triton() else None
        launches += [clamp] if clamp else clamp_by_torch(index, safe, flag, low, high, ignored)
    return checked, launches


def _are_within(index: torch.Tensor, low: int, high: int, ignored: int | None) -> bool:
    """Read on the host, once, when a program is bound."""
    right = (index >= low) & (index <= high)
    return bool((right if ignored is None else right | (index == ignored)).all())


def clamp_by_torch(
    index: torch.Tensor, safe: torch.Tensor, flag: torch.Tensor, low: int, high: int, ignored: int | None
) -> Iterator[Launch]:
    """As `launch_clamp`, by operators of torch."""
    differs, wrong = torch.empty_like(safe, dtype=torch.bool), torch.empty_like(flag)
    yield partial(torch.clamp, index, low, high, out=safe)
    if ignored is not None:
        is_ignored = torch.empty_like(differs)
        yield partial(torch.eq, index, ignored, out=is_ignored)
        yield partial(safe.masked_fill_, is_ignored, ignored)
    yield partial(torch.ne, index, safe, out=differs)
    yield partial(torch.any, differs, out=wrong)
    yield partial(flag.logical_or_, wrong)


def _ranges(template: CallTemplate, ins: Ins) -> Iterator[tuple[int, int, int, int | None]]:
    """(place among `ins`, least, greatest, a number that is no index) of each tensor of indices."""
    tensors, fixed = template.tensors, template.fixed
    if template.kind in LISTS:
        x = ins[_place(tensors["self"])]
        for axis, item in enumerate(tensors["indices"]):  # type: ignore[arg-type]
            if isinstance(item, InputRef) and ins[item.index].dtype in (torch.int32, torch.int64):
                yield item.index, -x.shape[axis], x.shape[axis] - 1, None
        return
    name, table = INDEXED[template.kind]
    place = _place(tensors[name])
    if not table:
        yield place, 0, int(fixed["num_weights"]) - 1, None
        return
    x = ins[_place(tensors[table])]
    if name == "target":
        yield place, 0, x.shape[min(1, x.dim() - 1)] - 1, int(fixed["ignore_index"])
    else:
        axis = int(fixed.get("dim", 0))
        yield place, 0, (x.shape[axis] if x.dim() else 1) - 1, None


def _place(item: Any) -> int:
    assert isinstance(item, InputRef)
    return item.index
