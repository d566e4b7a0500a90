"""Lifetimes of values, the blocks of storage that they need, and an offset in one arena for each block.

A value lives from the call that makes it to the last call that reads it, both included. Blocks that live at the same
time do not overlap.

Optimal packing is NP-hard. Some orders of the blocks are tried, and the smallest arena wins. Then the blocks that end
above the lower bound move half of the way to the front of the order, and the order is tried again: this nearly always
reaches the bound on real models. Moving the blocks all the way to the front would soon repeat itself, since the same
blocks would end above the bound again.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pipeline.ir.graph import Graph
from pipeline.lowering import KernelCall

ALIGNMENT: Final = 64
"""Bytes, in a plan for the CPU: a cache line, and the widest vector register (AVX-512)."""

ROUNDS: Final = 32
"""How often each order is tried. With 16 times, GIT stays at 1.035 of the bound; with 32, 254 families reach it."""

SMALL_WORK: Final = 2**20
"""The work that any plan may cost, some tenths of a second. A unit is one range of bytes that is looked at."""

WORK_FACTOR: Final = 24
"""A plan of n blocks may cost n log n times this much, until its arena is `NEAR` the bound."""

NEAR: Final = 1.01
"""A ratio of the arena to the bound; a better ratio is worth no more work than `SMALL_WORK`."""

NODE_WORK: Final = 8
"""The work that the nodes of the tree cost for one block, divided by log n."""


def align(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """`nbytes`, rounded up to a multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def aligned_peak(blocks: Sequence[Block], alignment: int = ALIGNMENT) -> int:
    """The most bytes that are alive in any one call, each block rounded up: no aligned arena can be smaller."""
    return live_peak(replace(block, nbytes=align(block.nbytes, alignment)) for block in blocks)


def assign_offsets(blocks: Sequence[Block], alignment: int = ALIGNMENT) -> tuple[dict[int, int], int]:
    """({root: byte offset}, bytes of the arena). Offsets are multiples of `alignment`.

    Blocks without bytes are at 0, and take no room.
    """
    offsets = dict.fromkeys((block.root for block in blocks), 0)
    full = [replace(block, nbytes=align(block.nbytes, alignment)) for block in blocks if block.nbytes]
    if not full:
        return offsets, 0
    best = _pack_best(full)
    return {**offsets, **best.offsets}, best.nbytes


@dataclass(frozen=True, slots=True)
class Packing:
    """An arena of `nbytes`: an offset for each block, by root."""

    offsets: Mapping[int, int]
    nbytes: int
    work: int = 0
    """Units of work that finding the packing took; see `SMALL_WORK`."""


def _pack_best(blocks: Sequence[Block]) -> Packing:
    """The smallest of some packings. The search ends when one is as small as the bound, or the work is used up."""
    bound = live_peak(blocks)
    best = pack_by_birth(blocks)
    most_work = max(SMALL_WORK, WORK_FACTOR * len(blocks) * len(blocks).bit_length())
    work = 0
    orders = [sorted(blocks, key=order) for order in ORDERS]
    for _ in range(ROUNDS):
        for at, order in enumerate(orders):
            if best.nbytes == bound:
                return best
            packing = pack_in_order(order, (SMALL_WORK if best.nbytes <= NEAR * bound else most_work) - work)
            if packing is None:
                return best
            best = min(best, packing, key=lambda candidate: candidate.nbytes)
            work += packing.work
            orders[at] = _promote(order, packing.offsets, bound)
    return best


def _calls_alive(block: Block) -> int:
    return block.life.last - block.life.first + 1


ORDERS: Final[tuple[Callable[[Block], tuple[int, ...]], ...]] = (
    lambda block: (-block.nbytes, -_calls_alive(block), block.root),
    lambda block: (-block.nbytes * _calls_alive(block), block.root),
    lambda block: (-_calls_alive(block), -block.nbytes, block.root),
)
"""Orders: largest first, the longest alive first among equals; by bytes × calls; longest alive first."""


def _promote(order: Sequence[Block], offsets: Mapping[int, int], bound: int) -> list[Block]:
    """`order` with each block that ends above `bound` moved to half its distance from the front."""
    places = [
        place if offsets[block.root] + block.nbytes <= bound else (place - 1) / 2 for place, block in enumerate(order)
    ]
    return [order[at] for at in sorted(range(len(order)), key=places.__getitem__)]


def pack_in_order(blocks: Sequence[Block], most_work: int) -> Packing | None:
    """Place `blocks`, which have bytes and multiples of the alignment, each into the tightest gap while it lives.

    None if placing takes more than `most_work`: there may be as many gaps as blocks, and the time would be quadratic.
    """
    offsets: dict[int, int] = {}
    arena_bytes = work = 0
    taken = _TakenBytes(max(block.life.last for block in blocks))
    for block in blocks:
        busy = sorted(taken.within(block.life))
        work += len(busy) + NODE_WORK * len(blocks).bit_length()
        if work > most_work:
            return None
        offsets[block.root] = offset = _find_gap(busy, block.nbytes)
        end = offset + block.nbytes
        taken.add(block.life, offset, end)
        arena_bytes = max(arena_bytes, end)
    return Packing(offsets, arena_bytes, work)


def _find_gap(busy: Sequence[tuple[int, int]], size: int) -> int:
    """The start of the tightest gap between the sorted `busy` ranges that holds `size`, else the first byte after."""
    tightest: tuple[int, int] | None = None
    free_from = 0
    for start, end in busy:
        gap = start - free_from
        if gap >= size and (tightest is None or gap < tightest[0]):
            tightest = gap, free_from
        free_from = max(free_from, end)
    return free_from if tightest is None else tightest[1]


def pack_by_birth(blocks: Sequence[Block]) -> Packing:
    """Place blocks as an allocator would that sees one call after the other. This order wins on long chains, and takes
    as long as sorting, whatever the lifetimes are."""
    offsets: dict[int, int] = {}
    free = _FreeBytes()
    alive: list[tuple[int, int, int]] = []
    """A heap: the last call, and the range of bytes."""
    for block in sorted(blocks, key=lambda block: (block.life.first, -block.nbytes, block.root)):
        while alive and alive[0][0] < block.life.first:
            _, start, end = heapq.heappop(alive)
            free.give_back(start, end)
        offsets[block.root] = offset = free.take(block.nbytes)
        heapq.heappush(alive, (block.life.last, offset, offset + block.nbytes))
    return Packing(offsets, free.top)


class _FreeBytes:
    """The gaps of an arena that grows at its top. Gaps that touch are joined."""

    def __init__(self) -> None:
        self.top = 0
        self._sizes: list[tuple[int, int]] = []
        """Size and start of each gap, sorted."""
        self._ends: dict[int, int] = {}
        """By start."""
        self._starts: dict[int, int] = {}
        """By end."""

    def take(self, size: int) -> int:
        """The start of `size` bytes: in the tightest gap that holds them, else at the top."""
        at = bisect_left(self._sizes, (size, 0))
        if at == len(self._sizes):
            start = self._starts.get(self.top, self.top)
            if start < self.top:
                self._remove(start, self.top)
            self.top = start + size
            return start
        _, start = self._sizes[at]
        end = self._ends[start]
        self._remove(start, end)
        if start + size < end:
            self._add(start + size, end)
        return start

    def give_back(self, start: int, end: int) -> None:
        """Free the bytes [start, end), which were taken."""
        if (before := self._starts.get(start)) is not None:
            self._remove(before, start)
            start = before
        if (after := self._ends.get(end)) is not None:
            self._remove(end, after)
            end = after
        self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        insort(self._sizes, (end - start, start))
        self._ends[start], self._starts[end] = end, start

    def _remove(self, start: int, end: int) -> None:
        del self._sizes[bisect_left(self._sizes, (end - start, start))], self._ends[start], self._starts[end]


@dataclass(slots=True)
class _Ranges:
    """A union of byte ranges, as sorted starts and ends. Ranges that touch are joined, so there are few of them."""

    starts: list[int]
    ends: list[int]

    def add(self, start: int, end: int) -> None:
        first, after = bisect_left(self.ends, start), bisect_right(self.starts, end)
        if first < after:
            start, end = min(start, self.starts[first]), max(end, self.ends[after - 1])
        self.starts[first:after], self.ends[first:after] = [start], [end]


class _TakenBytes:
    """The bytes that are taken, by call. As many blocks may be alive as there are calls, so a lookup visits unions of
    their bytes, which have few gaps, and not the blocks.

    A segment tree over the calls: node 1 stands for all of them, nodes 2n and 2n + 1 for the halves of node n. A block
    overlaps a lifetime if it is alive when that begins, or begins within it.
    """

    def __init__(self, last: int) -> None:
        """`last` is the end of the latest lifetime."""
        self._leaves = 1 << (last + 1).bit_length()  # calls begin at -1
        self._alive: dict[int, _Ranges] = {}
        """By node: the bytes of blocks whose lifetime contains all of the node's calls (and not of its parent's)."""
        self._begun: dict[int, _Ranges] = {}
        """By node: the bytes of blocks that begin in one of the node's calls."""

    def add(self, life: Lifetime, start: int, end: int) -> None:
        """Take bytes [start, end) while `life` lasts."""
        for node in self._cover(life.first, life.last):
            _add(self._alive, node, start, end)
        for node in self._above(life.first):
            _add(self._begun, node, start, end)

    def within(self, life: Lifetime) -> Iterator[tuple[int, int]]:
        """The ranges that are taken at some time in `life`, in no order; they may overlap."""
        for node in self._above(life.first):
            if (alive := self._alive.get(node)) is not None:
                yield from zip(alive.starts, alive.ends, strict=True)
        for node in self._cover(life.first + 1, life.last):
            if (begun := self._begun.get(node)) is not None:
                yield from zip(begun.starts, begun.ends, strict=True)

    def _above(self, call: int) -> Iterator[int]:
        node = call + 1 + self._leaves
        while node:
            yield node
            node //= 2

    def _cover(self, first: int, last: int) -> Iterator[int]:
        low, high = first + 1 + self._leaves, last + 2 + self._leaves
        while low < high:
            if low % 2:
                yield low
                low += 1
            if high % 2:
                high -= 1
                yield high
            low, high = low // 2, high // 2


def _add(unions: dict[int, _Ranges], node: int, start: int, end: int) -> None:
    union = unions.get(node)
    if union is None:
        unions[node] = _Ranges([start], [end])
    else:
        union.add(start, end)


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Indices of calls. `first` is -1 for a value that exists before the first call; `last` is the number of calls
    for a graph output or the new value of a state, which outlive them all. A value that nobody reads lives while its
    call runs."""

    first: int
    last: int

    def overlaps(self, other: Lifetime) -> bool:
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, slots=True)
class Block:
    """The storage of a class of values: its root's vid, its bytes, and when any member is alive."""

    root: int
    nbytes: int
    life: Lifetime


def lifetimes(graph: Graph, calls: Sequence[KernelCall]) -> dict[int, Lifetime]:
    """vid → Lifetime, for every value of the graph."""
    first = dict.fromkeys(range(len(graph.values)), -1)
    for index, call in enumerate(calls):
        first.update(dict.fromkeys(call.out_vids, index))
    last = dict(first)
    for index, call in enumerate(calls):
        last.update(dict.fromkeys(call.in_vids, index))
    last.update(dict.fromkeys((*graph.outputs, *graph.updates.values()), len(calls)))
    return {vid: Lifetime(first[vid], last[vid]) for vid in first}


def live_peak(blocks: Iterable[Block]) -> int:
    """The most bytes that are alive in any one call: no arena can be smaller."""
    change: dict[int, int] = {}
    for block in blocks:
        change[block.life.first] = change.get(block.life.first, 0) + block.nbytes
        change[block.life.last + 1] = change.get(block.life.last + 1, 0) - block.nbytes
    peak = alive = 0
    for index in sorted(change):
        alive += change[index]
        peak = max(peak, alive)
    return peak
