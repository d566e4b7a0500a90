"""Lifetimes of values, and offsets in one arena: blocks that live at the same time do not overlap.

A value lives from the call that makes it to the last call that reads it, both included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pipeline.ir.graph import Graph
from pipeline.lowering import KernelCall

__all__ = ["ALIGNMENT", "Block", "Lifetime", "assign_offsets", "lifetimes", "live_peak"]

T = TypeVar("T")

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register (AVX-512)."""


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


def assign_offsets(blocks: Sequence[Block]) -> tuple[dict[int, int], int]:
    """({root: byte offset}, bytes of the arena). Offsets are multiples of `ALIGNMENT`.

    Optimal packing is NP-hard. Two greedy orders are tried and the smaller arena wins: largest first, which packs
    transformers well, and order of birth, which wins on long chains of equal blocks.
    """
    largest_first = sorted(blocks, key=lambda block: (-block.nbytes, block.life.first, block.root))
    by_birth = sorted(blocks, key=lambda block: (block.life.first, -block.nbytes, block.root))
    return min((_pack(largest_first), _pack(by_birth)), key=lambda packed: packed[1])


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


def _pack(blocks: Sequence[Block]) -> tuple[dict[int, int], int]:
    offsets: dict[int, int] = {}
    arena_bytes = 0
    placed = LifetimeIndex[tuple[int, int]](max((block.life.last for block in blocks), default=0))  # offset and end
    for block in blocks:
        size = -(-block.nbytes // ALIGNMENT) * ALIGNMENT
        offset = 0
        if size:  # empty blocks take no room
            offset = _best_fit(sorted(placed.overlapping(block.life)), size)
            placed.add(block.life, (offset, offset + size))
        offsets[block.root] = offset
        arena_bytes = max(arena_bytes, offset + size)
    return offsets, arena_bytes


def _best_fit(busy: Sequence[tuple[int, int]], size: int) -> int:
    """The start of the tightest gap between the sorted `busy` ranges that holds `size`, else the first byte after."""
    tightest: tuple[int, int] | None = None
    free_from = 0
    for offset, end in busy:
        gap = offset - free_from
        if gap >= size and (tightest is None or gap < tightest[0]):
            tightest = gap, free_from
        free_from = max(free_from, end)
    return free_from if tightest is None else tightest[1]


class LifetimeIndex(Generic[T]):
    """Items by lifetime. Finds the items alive at some time without looking at all others, which would be quadratic in
    the number of calls.

    A segment tree over the calls: node 1 stands for all of them, nodes 2n and 2n + 1 for the halves of node n. An
    item overlaps a lifetime if it is alive when that begins, or begins within it.
    """

    def __init__(self, last: int) -> None:
        """`last` is the end of the latest lifetime."""
        self._leaves = 1 << (last + 1).bit_length()  # calls begin at -1
        self._alive: defaultdict[int, list[T]] = defaultdict(list)
        """By node: the items whose lifetime contains all of the node's calls (and not all of its parent's)."""
        self._begun: defaultdict[int, list[T]] = defaultdict(list)
        """By node: the items that begin in one of the node's calls."""

    def add(self, life: Lifetime, item: T) -> None:
        for node in self._cover(life.first, life.last):
            self._alive[node].append(item)
        for node in self._above(life.first):
            self._begun[node].append(item)

    def overlapping(self, life: Lifetime) -> Iterator[T]:
        """The items whose lifetimes overlap `life`, each once."""
        for node in self._above(life.first):
            yield from self._alive.get(node, ())
        for node in self._cover(life.first + 1, life.last):
            yield from self._begun.get(node, ())

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
