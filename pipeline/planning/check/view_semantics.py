"""The meaning of each kind of view: which element of the operand each of its elements is.

The planner composes strides; here nothing is composed. Elements of the view are picked, the definition says which
element of the operand each one is, and both have to have the same address. Addresses are linear in the index, so a few
positions on every axis suffice (the first, the last, and powers of two, at which split axes of a Reshape carry over).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.lowering import KernelCall
from pipeline.ops import Kind, unpack
from pipeline.planning.check.shadow_memory import addresses
from pipeline.planning.plan import ExecutionPlan

Index = Sequence[int]
Sizes = Sequence[int]


@dataclass(frozen=True, slots=True)
class ViewElement:
    """One element of an output of a view call."""

    attrs: Mapping[str, Any]
    output: int
    """Which output of the call it is of."""
    index: Index
    sizes: Sizes
    """Those of the output."""
    source_sizes: Sizes
    """Those of the operand."""


def shows_its_operand(plan: ExecutionPlan, call: KernelCall, out: int, source: int) -> bool:
    """Whether `out`, an output of `call`, shows the elements of `source` that the definition of its kind says."""
    index_in_source = VIEW_INDEX.get(call.kind_id)
    sizes, source_sizes = plan.slots[out].spec.sizes, plan.slots[source].spec.sizes
    if index_in_source is None:
        return False
    attrs, output = unpack(call.attr_schema, call.attr_blob), call.out_vids.index(out)
    address, source_address = addresses(plan, out), addresses(plan, source)
    try:
        for index in _sample_indices(sizes):
            found = index_in_source(ViewElement(attrs, output, index, sizes, source_sizes))
            if not _is_inside(found, source_sizes) or address(index) != source_address(found):
                return False
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return False  # attributes that mean nothing for these sizes, such as a step of 0, show nothing
    return True


def _is_inside(index: Index, sizes: Sizes) -> bool:
    return len(index) == len(sizes) and all(0 <= at < size for at, size in zip(index, sizes, strict=True))


def _sample_indices(sizes: Sizes) -> Iterator[Index]:
    if 0 in sizes:
        return
    first, last = [0] * len(sizes), [size - 1 for size in sizes]
    yield first
    for axis, size in enumerate(sizes):
        for position in {1 << bit for bit in range(size.bit_length())} | {size - 1}:
            if position < size:
                yield [*first[:axis], position, *first[axis + 1 :]]
                yield [*last[:axis], position, *last[axis + 1 :]]


def identity(view: ViewElement) -> Index:
    return view.index


def reshape(view: ViewElement) -> Index:
    """Reshape keeps the row-major number of each element."""
    if math.prod(view.sizes) != math.prod(view.source_sizes):
        return ()
    count, found = 0, []
    for position, size in zip(view.index, view.sizes, strict=True):
        count = count * size + position
    for size in reversed(view.source_sizes):
        count, position = divmod(count, size)
        found.append(position)
    return found[::-1]


def transpose(view: ViewElement) -> Index:
    return [view.index[view.attrs["perm"].index(axis)] for axis in range(len(view.index))]


def split(view: ViewElement) -> Index:
    axis, before = view.attrs["axis"] % len(view.source_sizes), sum(view.attrs["sizes"][: view.output])
    return [position + before if here == axis else position for here, position in enumerate(view.index)]


def slice_(view: ViewElement) -> Index:
    found = list(view.index)
    bounds = (view.attrs[name] for name in ("axes", "starts", "ends", "steps"))
    for axis, start, end, step in zip(*bounds, strict=True):
        positions = range(view.source_sizes[axis])[start:end:step]
        found[axis] = positions[found[axis]] if found[axis] < len(positions) else -1
    return found


def expand(view: ViewElement) -> Index:
    inner = view.index[len(view.sizes) - len(view.source_sizes) :]
    return [0 if size == 1 else position for position, size in zip(inner, view.source_sizes, strict=True)]


def select(view: ViewElement) -> Index:
    return with_axis(view, view.attrs["index"])


def unbind(view: ViewElement) -> Index:
    return with_axis(view, view.output)


def with_axis(view: ViewElement, position: int) -> Index:
    axis = view.attrs["axis"]
    return [*view.index[:axis], position, *view.index[axis:]]


def diagonal(view: ViewElement) -> Index:
    rest, last, distance = list(view.index[:-1]), view.index[-1], view.attrs["distance"]
    place = {view.attrs["first"]: last - min(distance, 0), view.attrs["second"]: last + max(distance, 0)}
    return [place[axis] if axis in place else rest.pop(0) for axis in range(len(view.source_sizes))]


def unfold(view: ViewElement) -> Index:
    axis, index = view.attrs["axis"], view.index
    return [*index[:axis], index[axis] * view.attrs["step"] + index[-1], *index[axis + 1 : -1]]


VIEW_INDEX: Mapping[int, Callable[[ViewElement], Index]] = {
    Kind.Identity: identity,
    Kind.Reshape: reshape,
    Kind.Transpose: transpose,
    Kind.Split: split,
    Kind.Slice: slice_,
    Kind.Expand: expand,
    Kind.Select: select,
    Kind.Unbind: unbind,
    Kind.Diagonal: diagonal,
    Kind.Unfold: unfold,
    Kind.Contiguous: identity,
}
"""By kind, the index in the operand of each element of a view."""
