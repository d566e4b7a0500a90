"""Shadow memory: what the checker of a plan knows of each byte, without a run and without the planner's own facts.

Three questions are answered here:

- which bytes a value has by the plan's tables (`place`);
- which values are intact, that is, computed and not overwritten since (`IntactValues`, by byte, so that a write finds
  what it destroys);
- whether the memory map, which says where each value lies during which calls, keeps every value for as long as a call
  needs it, with nothing else on its bytes (`wrong_residences`). Which calls need a value is derived from the calls.
  While a value moves between two calls, both its old bytes and its new bytes count as taken.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from pipeline.planning.plan import ExecutionPlan, MemoryMap, Residence

ARENA = -1


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes [start, end) of one memory: the arena (`region` is ARENA), or an external value's storage (its vid).

    A strided value has all bytes from its first to its last element, gaps included: a write into a gap counts as a
    write over the value. That refuses no plan that the planner makes, since no call writes into such gaps.
    """

    region: int
    start: int
    end: int

    def overlaps(self, other: ByteRange) -> bool:
        return self.region == other.region and max(self.start, other.start) < min(self.end, other.end)


def roots_of(plan: ExecutionPlan) -> list[int]:
    """The root of each vid's alias chain. No chain is walked twice, since one may be as long as the plan."""
    roots = [-1] * len(plan.slots)
    for start in range(len(roots)):
        chain, vid = [start], start
        while roots[vid] < 0 and vid in plan.alias:
            vid = plan.alias[vid]
            chain.append(vid)
        root = vid if roots[vid] < 0 else roots[vid]
        for member in chain:
            roots[member] = root
    return roots


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides."""
    strides = [1] * len(sizes)
    for axis in range(len(sizes) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(sizes[axis + 1], 1)
    return tuple(strides)


def has_distinct_elements(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether each axis steps over all that the axes of smaller stride touch, so that no two elements share a byte.

    The rule is sufficient but not necessary: strides (3, 2) with sizes (2, 3) address distinct elements, and are
    refused.
    """
    touched = 1
    for stride, size in sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if size > 1):
        if stride < touched:
            return 0 in sizes  # nothing overlaps where there are no elements
        touched += stride * (size - 1)
    return True


def strides_of(plan: ExecutionPlan, vid: int) -> tuple[tuple[int, ...], int]:
    """(strides, offset) in elements of the root's storage."""
    layout = plan.layouts.get(vid)
    return (contiguous_strides(plan.slots[vid].spec.sizes), 0) if layout is None else (layout.strides, layout.offset)


def address_of(plan: ExecutionPlan, vid: int) -> Callable[[Sequence[int]], int]:
    """A function from the index of an element of `vid` to its position, in elements, in the storage of the root."""
    strides, offset = strides_of(plan, vid)
    return lambda index: offset + sum(at * stride for at, stride in zip(index, strides, strict=True))


def span(plan: ExecutionPlan, vid: int) -> tuple[int, int]:
    """The elements [first, end) of the root's storage that the value can touch."""
    sizes, address = plan.slots[vid].spec.sizes, address_of(plan, vid)
    first = address([0] * len(sizes))
    return (first, address([size - 1 for size in sizes]) + 1) if 0 not in sizes else (first, first)


def place(plan: ExecutionPlan, vid: int, root: int) -> ByteRange:
    """The bytes of `vid`; `root` is the root of its alias chain."""
    spec = plan.slots[vid].spec
    item = spec.nbytes // max(spec.numel, 1)
    base = plan.offsets.get(root, 0)
    first, end = span(plan, vid)
    return ByteRange(ARENA if root in plan.offsets else root, base + first * item, base + end * item)


class IntactValues:
    """The values that are intact (computed, and not overwritten since), and their bytes.

    A region is divided into sections: a section begins wherever a value begins or ends, and knows the values that cover
    it. So a write visits the sections within its own bytes, and not every value of the plan.
    """

    def __init__(self) -> None:
        self._places: dict[int, ByteRange] = {}
        self._added: dict[int, int] = {}
        """When each value was last added, as a count."""
        self._count = count()
        self._starts: dict[int, list[int]] = {}
        """By region, the first byte of each section, in order."""
        self._covering: dict[tuple[int, int], set[int]] = {}
        """By region and first byte of a section, the values that cover it."""

    def __contains__(self, vid: int) -> bool:
        return vid in self._places

    def add(self, vid: int, place: ByteRange) -> None:
        """Make `vid` intact. An empty value covers nothing, so nothing can destroy it."""
        if vid in self._places:
            self._remove(vid)
        self._places[vid] = place
        self._added[vid] = next(self._count)
        for start in self._sections_in(place):
            self._covering[place.region, start].add(vid)

    def destroy(self, place: ByteRange) -> list[int]:
        """Mark the values with a byte in `place` as destroyed. Returns these values, in the order in which they were
        added."""
        inside = self._sections_in(place)
        found = set[int]().union(*(self._covering[place.region, start] for start in inside))
        for vid in found:
            self._remove(vid)
        for start in inside[1:]:  # no intact value covers these sections, so they are merged with the first
            del self._covering[place.region, start]
        if inside:
            starts = self._starts[place.region]
            first = bisect_left(starts, inside[0])
            del starts[first + 1 : first + len(inside)]
        return sorted(found, key=self._added.__getitem__)

    def _remove(self, vid: int) -> None:
        place = self._places.pop(vid)
        for start in self._sections_in(place):
            self._covering[place.region, start].discard(vid)

    def _sections_in(self, place: ByteRange) -> list[int]:
        """The first bytes of the sections of `place`; sections that cross an end of `place` are divided there."""
        if place.start >= place.end:
            return []
        starts = self._starts.setdefault(place.region, [])
        first, last = self._divide(place.region, starts, place.start), self._divide(place.region, starts, place.end)
        return starts[first:last]

    def _divide(self, region: int, starts: list[int], at: int) -> int:
        """The index of the section that begins at byte `at`; if there is none, the section around `at` is divided."""
        index = bisect_left(starts, at)
        if index == len(starts) or starts[index] != at:
            covering = self._covering[region, starts[index - 1]] if index else set[int]()
            starts.insert(index, at)
            self._covering[region, at] = set(covering)
        return index


def wrong_residences(plan: ExecutionPlan) -> list[str]:
    """Sentences on what is wrong with the plan's memory map; none if nothing is, or if the plan has no map.

    The other tables of the plan (offsets, aliases, layouts, calls) have to be right.
    """
    if plan.memory is None:
        return []
    tables = [*_wrong_tables(plan, plan.memory)]
    return tables or [*_wrong_lives(plan, plan.memory), *_collisions(plan, plan.memory)]


def _wrong_tables(plan: ExecutionPlan, memory: MemoryMap) -> Iterator[str]:
    names = [region.name for region in memory.regions]
    if len({*names}) != len(names) or "" in names or not names:
        yield f"the regions are called {names}; expected names, each once"
    for at, region in enumerate(memory.regions):
        if region.nbytes is None:
            if at < len(memory.regions) - 1:
                yield f"region {region.name!r} has no size; only the last one may be without a bound"
        elif not 0 <= region.nbytes < 2**63:
            yield f"region {region.name!r} has {region.nbytes} bytes"
    for residence in memory.residences:
        if residence.root not in plan.offsets or residence.region not in range(len(memory.regions)):
            yield f"{residence} is of no value of the arena, or in no region"
            continue
        end, room = residence.offset + plan.slots[residence.root].spec.nbytes, memory.regions[residence.region].nbytes
        if residence.offset < 0 or residence.offset % plan.alignment or (room is not None and end > room):
            name, region = _value_in(plan, residence), names[residence.region]
            yield f"{name} is at bytes {residence.offset} to {end} of {region!r}, which has {room}"
    for root, region in memory.pins.items():
        held = [residence.region for residence in memory.residences if residence.root == root]
        if not held or {*held} != {region}:
            yield f"vid {root} is pinned to region {region}, and lies in {held}"
    order = [(residence.root, residence.first) for residence in memory.residences]
    if order != sorted(order):
        yield "the residences are not in the order of values and time"


def _wrong_lives(plan: ExecutionPlan, memory: MemoryMap) -> Iterator[str]:
    """Each value has residences without a gap between them, from the call that makes it to the last that needs it.

    A residence holds from the call `first` to the call `last`, both included.
    """
    roots = roots_of(plan)
    needed: dict[int, list[int]] = {}
    for at, call in enumerate(plan.calls):
        for vid in (*call.in_vids, *call.out_vids):
            needed.setdefault(roots[vid], []).append(at)
    for vid in (*plan.outputs, *plan.updates.values()):
        needed.setdefault(roots[vid], []).append(len(plan.calls))
    held: dict[int, list[Residence]] = {}
    for residence in memory.residences:
        held.setdefault(residence.root, []).append(residence)
    for root in plan.offsets:
        spans = [(residence.first, residence.last) for residence in held.get(root, [])]
        if not plan.slots[root].spec.nbytes:
            if spans:
                yield f"{plan.slots[root].name!r} (vid {root}) has no bytes, and is in a region"
            continue
        wanted = (min(needed[root]), max(needed[root]))
        ends = [last + 1 for _, last in spans[:-1]]
        is_whole = bool(spans) and ends == [first for first, _ in spans[1:]] and all(a <= b for a, b in spans)
        if not is_whole or (spans[0][0], spans[-1][1]) != wanted:
            yield f"{plan.slots[root].name!r} (vid {root}) is held in the calls {spans}; it is needed in {wanted}"


def _collisions(plan: ExecutionPlan, memory: MemoryMap) -> Iterator[str]:
    """Two values on the same bytes of a region: in a call, or before one where a move reads or writes them."""
    taken: dict[int, list[tuple[int, int, int]]] = {}
    """By region, in order: first byte and end of each residence that is there, and its index. They do not overlap:
    one that does is reported, and not added."""
    events = [(time, is_begin, at) for at in range(len(memory.residences)) for time, is_begin in _times(memory, at)]
    for _, is_begin, at in sorted(events):
        residence = memory.residences[at]
        here = taken.setdefault(residence.region, [])
        mine = (residence.offset, residence.offset + plan.slots[residence.root].spec.nbytes, at)
        place = bisect_left(here, mine)
        if not is_begin:
            if here[place : place + 1] == [mine]:
                del here[place]
            continue
        others = [span for span in here[max(place - 1, 0) : place + 1] if max(mine[0], span[0]) < min(mine[1], span[1])]
        for *_, other in others:
            names = f"{_value_in(plan, memory.residences[other])} and {_value_in(plan, residence)}"
            yield f"{names} share bytes of region {residence.region} at call {residence.first}"
        if not others:
            here.insert(place, mine)


def _times(memory: MemoryMap, at: int) -> tuple[tuple[int, bool], tuple[int, bool]]:
    """When the bytes of a residence become taken (True), and when they become free again.

    Call c runs at time 2c + 1. A value that moves before call c moves at time 2c, and has both places then.
    """
    residence = memory.residences[at]
    before = memory.residences[at - 1] if at else None
    after = memory.residences[at + 1] if at + 1 < len(memory.residences) else None
    arrives = before is not None and before.root == residence.root
    leaves = after is not None and after.root == residence.root
    return (2 * residence.first + (0 if arrives else 1), True), (2 * residence.last + (3 if leaves else 2), False)


def _value_in(plan: ExecutionPlan, residence: Residence) -> str:
    return f"{plan.slots[residence.root].name!r} (vid {residence.root})"
