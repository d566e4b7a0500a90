"""Lifetimes of values, and the blocks of storage that they need.

A value lives from the call that makes it to the last call that reads it, both included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.ir.graph import Graph
from pipeline.lowering import KernelCall


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
