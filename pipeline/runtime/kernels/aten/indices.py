"""Check indices on the device, before a kernel reads them: an index out of range ends the whole context of CUDA.

A launch clamps the indices first, and the kernel reads the clamped ones. Where that changed any, a flag of the call is
set, which stays set until launches after it copy the flags to the host and clear them. The host looks at the copy when
the device is done with it, and waits for nothing. So the error is raised by a later run than the one with the wrong
index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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

IndexRange = tuple[int, int, int | None]
"""The least index, the greatest one, and a number that is no index, if there is one."""


def range_along(sizes: Sequence[int], call: Mapping[str, Any]) -> IndexRange:
    """Places along the axis `dim`, or along the first one."""
    return 0, (sizes[int(call.get("dim", 0))] if sizes else 1) - 1, None


def range_of_dim(sizes: Sequence[int], call: Mapping[str, Any]) -> IndexRange:
    """Places along the axis `dim`, or among all elements."""
    return (0, math.prod(sizes) - 1, None) if call.get("dim") is None else range_along(sizes, call)


def range_from_both_ends(sizes: Sequence[int], call: Mapping[str, Any]) -> IndexRange:
    _, last, _ = range_along(sizes, call)
    return -last - 1, last, None


def range_anywhere(sizes: Sequence[int], _: Mapping[str, Any]) -> IndexRange:
    """Places among all elements, also from the end."""
    return -math.prod(sizes), math.prod(sizes) - 1, None


def range_of_classes(sizes: Sequence[int], call: Mapping[str, Any]) -> IndexRange:
    return 0, sizes[min(1, len(sizes) - 1)] - 1, int(call.get("ignore_index", -100))


def range_of_margins(sizes: Sequence[int], _: Mapping[str, Any]) -> IndexRange:
    return 0, sizes[-1] - 1, None


def range_of_many_classes(sizes: Sequence[int], _: Mapping[str, Any]) -> IndexRange:
    """A row ends where it has a number below 0."""
    return -(2**31), sizes[-1] - 1, None


def range_of_table(_: Sequence[int], call: Mapping[str, Any]) -> IndexRange:
    return 0, int(call["num_weights"]) - 1, None


def range_of_offsets(sizes: Sequence[int], _: Mapping[str, Any]) -> IndexRange:
    return 0, sizes[0], None


def range_of_image(_: Sequence[int], call: Mapping[str, Any]) -> IndexRange:
    return 0, math.prod(call["output_size"]) - 1, None


RangeRule = Callable[[Sequence[int], Mapping[str, Any]], IndexRange]
"""(sizes of the operand that the indices select from, arguments without tensors) → the range of the indices."""

ALONG: Final = """
index_select.default gather.default index_copy.default index_add.default
index_reduce.default scatter.src scatter.value scatter.reduce scatter.value_reduce scatter_add.default
scatter_reduce.two
"""

CLASSES: Final = """
cross_entropy_loss.default nll_loss.default nll_loss_nd.default nll_loss2d.default nll_loss_forward.default
nll_loss_backward.default nll_loss2d_forward.default nll_loss2d_backward.default
"""

BAG: Final = (("indices", "weight", range_along), ("offsets", "indices", range_of_offsets))

INDEXED: Final[Mapping[str, Sequence[tuple[str, str, RangeRule]]]] = {
    "aten.embedding.default": (("indices", "weight", range_along),),
    "aten.embedding_renorm.default": (("indices", "self", range_along),),
    "aten.embedding_dense_backward.default": (("indices", "grad_output", range_of_table),),
    "aten.embedding_bag.default": BAG,
    "aten.embedding_bag.padding_idx": BAG,
    "aten._embedding_bag.default": BAG,
    "aten._embedding_bag_forward_only.default": BAG,
    "aten.index_fill.int_Scalar": (("index", "self", range_from_both_ends),),
    "aten.index_fill.int_Tensor": (("index", "self", range_from_both_ends),),
    "aten.take_along_dim.default": (("indices", "self", range_of_dim),),
    "aten.take.default": (("index", "self", range_anywhere),),
    "aten.put.default": (("index", "self", range_anywhere),),
    "aten.max_unpool2d.default": (("indices", "self", range_of_image),),
    "aten.max_unpool3d.default": (("indices", "self", range_of_image),),
    "aten.multi_margin_loss.default": (("target", "self", range_of_margins),),
    "aten.multilabel_margin_loss.default": (("target", "self", range_of_many_classes),),
    **{f"aten.{name}": (("index", "self", range_along),) for name in ALONG.split()},
    **{f"aten.{name}": (("target", "self", range_of_classes),) for name in CLASSES.split()},
}
"""Operator → its indices, the operand that they select from, and their range. `LISTS` has the operators with a list of
indices. All others read no indices, or indices that another operator made."""

LISTS: Final = (
    "aten.index.Tensor", "aten.index_put.default", "aten._unsafe_index.Tensor", "aten._unsafe_index_put.default",
)  # fmt: skip
"""Operators with a list of indices, one for each axis."""

INTEGERS: Final = (torch.int32, torch.int64)
"""The dtypes of indices; a target of another dtype has probabilities, and a mask no index."""


class IndexFlags:
    """A flag for each tensor of indices that the launches of one program read. Its runs and all its captures set the
    same flags, so that nothing is lost with a capture."""

    def __init__(self, device: Device, most: int) -> None:
        self.memory = device.empty((most,), None, torch.bool).zero_()
        self.owners: dict[tuple[int, int], int] = {}
        """(index of a call in the plan, operand) → the number of its flag; in the order of the flags."""
        self._device, self._late = device, device.late_value(self.memory)
        self._wrong: dict[int, None] = {}
        """The calls, in order, that had a wrong index which the host knows of, and which no error has named."""

    def flag_of(self, call: int, operand: int) -> torch.Tensor:
        """The flag of a call's operand, made when it is first asked for."""
        return self.memory[self.owners.setdefault((call, operand), len(self.owners))]

    def start(self) -> None:
        """After launches: look at the flags when the device is done."""
        self._late.start()

    def wait(self) -> None:
        """Wait for the device, so that `poll` knows of everything that was launched before."""
        self._device.synchronize()
        self._collect()  # ends a look that began before the last launches
        with self._device.scope():
            self._late.start(at_once=True)
        self._device.synchronize()

    def poll(self) -> int | None:
        """The place of a call that had a wrong index, if the host knows of one by now; each is given once."""
        self._collect()
        wrong = next(iter(self._wrong), None)
        self._wrong.pop(wrong, None)  # type: ignore[arg-type]
        return wrong

    def _collect(self) -> None:
        found = self._late.poll()
        if found is not None and found.any():
            calls = [call for call, _ in self.owners]
            self._wrong.update(dict.fromkeys(calls[at] for at in found.nonzero().flatten().tolist()))


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
    for at, (low, high, ignored) in _ranges(template, ins):
        index = ins[at]
        if at in current.constants and _are_within(index, low, high, ignored):
            continue
        flag = current.flags.flag_of(current.call, at)
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


def _ranges(template: CallTemplate, ins: Ins) -> Iterator[tuple[int, IndexRange]]:
    """Each place among `ins` that has indices, and their range."""
    tensors = template.tensors
    if template.kind in LISTS:
        sizes = ins[_place(tensors["self"])].shape
        for axis, item in enumerate(tensors["indices"]):  # type: ignore[arg-type]
            if isinstance(item, InputRef) and ins[item.index].dtype in INTEGERS:
                yield item.index, (-sizes[axis], sizes[axis] - 1, None)
        return
    for name, table, rule in INDEXED[template.kind]:
        place = _place(tensors[name])
        if ins[place].dtype in INTEGERS:
            yield place, rule(ins[_place(tensors[table])].shape, template.fixed)


def _place(item: Any) -> int:
    assert isinstance(item, InputRef)
    return item.index
