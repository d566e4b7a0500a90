"""Where a value lies, worked out from the tables of a plan: region, bytes that it can touch, addresses of elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.planning.plan import ExecutionPlan

__all__ = ["ARENA", "Place", "address", "apart", "place", "roots_of", "rows", "span", "strides_of"]

ARENA = -1


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes [start, end) of a region: the arena, or the storage of one external value (region = its vid).

    Of a strided value these are all bytes from its first to its last one, gaps included: a write between its elements
    counts as one over them. No plan needs such writes.
    """

    region: int
    start: int
    end: int

    def overlaps(self, other: Place) -> bool:
        return self.region == other.region and max(self.start, other.start) < min(self.end, other.end)


def roots_of(plan: ExecutionPlan) -> list[int]:
    """By vid, where its aliases end. No chain of them is walked twice, since one may be as long as the plan."""
    roots = [-1] * len(plan.slots)
    for start in range(len(roots)):
        way, vid = [start], start
        while roots[vid] < 0 and vid in plan.alias:
            vid = plan.alias[vid]
            way.append(vid)
        root = vid if roots[vid] < 0 else roots[vid]
        for passed in way:
            roots[passed] = root
    return roots


def rows(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides of rows that lie one after the other."""
    strides = [1] * len(sizes)
    for axis in range(len(sizes) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(sizes[axis + 1], 1)
    return tuple(strides)


def apart(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no two elements lie on one place: each axis steps over everything that the finer ones touch."""
    touched = 1
    for stride, size in sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if size > 1):
        if stride < touched:
            return 0 in sizes
        touched += stride * (size - 1)
    return True


def strides_of(plan: ExecutionPlan, vid: int) -> tuple[tuple[int, ...], int]:
    """(strides, offset) in elements of the root's storage."""
    layout = plan.layouts.get(vid)
    return (rows(plan.slots[vid].spec.sizes), 0) if layout is None else (layout.strides, layout.offset)


def address(plan: ExecutionPlan, vid: int, index: Sequence[int]) -> int:
    """Which element of the root's storage the element at `index` is."""
    strides, offset = strides_of(plan, vid)
    return offset + sum(at * stride for at, stride in zip(index, strides, strict=True))


def span(plan: ExecutionPlan, vid: int) -> tuple[int, int]:
    """The elements [first, end) of the root's storage that the value can touch."""
    sizes = plan.slots[vid].spec.sizes
    first = address(plan, vid, [0] * len(sizes))
    return (first, address(plan, vid, [size - 1 for size in sizes]) + 1) if 0 not in sizes else (first, first)


def place(plan: ExecutionPlan, vid: int, root: int) -> Place:
    """`root` is where the aliases of `vid` end."""
    spec = plan.slots[vid].spec
    item = spec.nbytes // max(spec.numel, 1)
    base = plan.offsets.get(root, 0)
    first, end = span(plan, vid)
    return Place(ARENA if root in plan.offsets else root, base + first * item, base + end * item)
