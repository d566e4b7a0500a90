"""What a view has to show, by the definition of its kind: which element of the operand each of its elements is.

The planner composes strides; here nothing is composed. Elements of the view are picked, the definition says which
element of the operand each one is, and both have to have the same address. Addresses are linear in the index, so a few
positions on every axis tell (the first, the last, and powers of two, at which cut-up axes of a Reshape carry over).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipeline.lowering import KernelCall, Kind, unpack
from pipeline.planning.check.places import address, rows
from pipeline.planning.plan import ExecutionPlan

__all__ = ["SHOWN", "shows_its_operand"]

Index = Sequence[int]
Sizes = Sequence[int]

Shown = Callable[[Mapping[str, Any], int, Index, Sizes, Sizes], Index]
"""(attrs, which output, index in it, its sizes, the operand's sizes) -> index in the operand."""


def shows_its_operand(plan: ExecutionPlan, call: KernelCall, out: int, source: int) -> bool:
    """Whether `out`, an output of `call`, lies on exactly those elements of `source` that its kind is about."""
    shown = SHOWN.get(call.kind_id)
    mine, theirs = plan.slots[out].spec.sizes, plan.slots[source].spec.sizes
    if shown is None:
        return False
    attrs, at = unpack(call.attr_schema, call.attr_blob), call.out_vids.index(out)
    for index in _picked(mine):
        found = shown(attrs, at, index, mine, theirs)
        if len(found) != len(theirs) or any(not 0 <= item < size for item, size in zip(found, theirs, strict=True)):
            return False
        if address(plan, out, index) != address(plan, source, found):
            return False
    return True


def _picked(sizes: Sizes) -> Iterator[Index]:
    if 0 in sizes:
        return
    first, last = [0] * len(sizes), [size - 1 for size in sizes]
    yield first
    for axis, size in enumerate(sizes):
        for position in {1 << bit for bit in range(size.bit_length())} | {size - 1}:
            if position < size:
                yield [*first[:axis], position, *first[axis + 1 :]]
                yield [*last[:axis], position, *last[axis + 1 :]]


def same(attrs: Mapping[str, Any], at: int, index: Index, mine: Sizes, theirs: Sizes) -> Index:
    del attrs, at, mine, theirs
    return index


def same_order(attrs: Mapping[str, Any], at: int, index: Index, mine: Sizes, theirs: Sizes) -> Index:
    """Reshape: the elements counted through, row after row."""
    del attrs, at
    if math.prod(mine) != math.prod(theirs):
        return ()
    count = sum(position * step for position, step in zip(index, rows(mine), strict=True))
    return [count // step % size for step, size in zip(rows(theirs), theirs, strict=True)]


def turned(attrs: Mapping[str, Any], at: int, index: Index, mine: Sizes, theirs: Sizes) -> Index:
    del at, mine, theirs
    return [index[attrs["perm"].index(axis)] for axis in range(len(index))]


def piece(attrs: Mapping[str, Any], at: int, index: Index, mine: Sizes, theirs: Sizes) -> Index:
    del mine
    axis, before = attrs["axis"] % len(theirs), sum(attrs["sizes"][:at])
    return [position + before if here == axis else position for here, position in enumerate(index)]


def taken(attrs: Mapping[str, Any], at: int, index: Index, mine: Sizes, theirs: Sizes) -> Index:
    del at, mine
    found = list(index)
    for axis, start, end, step in zip(attrs["axes"], attrs["starts"], attrs["ends"], attrs["steps"], strict=True):
        positions = range(theirs[axis])[start:end:step]
        found[axis] = positions[found[axis]] if found[axis] < len(positions) else -1
    return found


def repeated(attrs: Mapping[str, Any], at: int, index: Index, mine: Sizes, theirs: Sizes) -> Index:
    del attrs, at
    inner = index[len(mine) - len(theirs) :]
    return [0 if size == 1 else position for position, size in zip(inner, theirs, strict=True)]


def picked(attrs: Mapping[str, Any], at: int, index: Index, mine: Sizes, theirs: Sizes) -> Index:
    del at, mine, theirs
    return [*index[: attrs["axis"]], attrs["index"], *index[attrs["axis"] :]]


def unbound(attrs: Mapping[str, Any], at: int, index: Index, mine: Sizes, theirs: Sizes) -> Index:
    return picked({"axis": attrs["axis"], "index": at}, at, index, mine, theirs)


def on_the_diagonal(attrs: Mapping[str, Any], at: int, index: Index, mine: Sizes, theirs: Sizes) -> Index:
    del at, mine
    rest, distance = list(index[:-1]), attrs["distance"]
    place = {attrs["first"]: index[-1] - min(distance, 0), attrs["second"]: index[-1] + max(distance, 0)}
    return [place[axis] if axis in place else rest.pop(0) for axis in range(len(theirs))]


def in_the_window(attrs: Mapping[str, Any], at: int, index: Index, mine: Sizes, theirs: Sizes) -> Index:
    del at, mine, theirs
    axis = attrs["axis"]
    return [*index[:axis], index[axis] * attrs["step"] + index[-1], *index[axis + 1 : -1]]


SHOWN: Mapping[int, Shown] = {
    Kind.Identity: same,
    Kind.Reshape: same_order,
    Kind.Transpose: turned,
    Kind.Split: piece,
    Kind.Slice: taken,
    Kind.Expand: repeated,
    Kind.Select: picked,
    Kind.Unbind: unbound,
    Kind.Diagonal: on_the_diagonal,
    Kind.Unfold: in_the_window,
    Kind.Contiguous: same,
}
