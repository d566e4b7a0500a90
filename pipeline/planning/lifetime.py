"""When a value is needed: from the call that makes it to the last call that reads it, both included."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pipeline.ir.graph import Graph
from pipeline.lowering import KernelCall

__all__ = ["Lifetime", "LifetimeIndex", "lifetimes"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Indices of calls. `first` is -1 for a value that exists before the first call; `last` is the number of calls
    for a graph output or the new value of a state, which outlive them all. A value that nobody reads lives while its
    call runs."""

    first: int
    last: int

    def overlaps(self, other: Lifetime) -> bool:
        return self.first <= other.last and other.first <= self.last


class LifetimeIndex(Generic[T]):
    """Items by lifetime. It finds those alive at some time without a look at all others, which would be the square of
    the calls.

    A segment tree over the calls: node 1 stands for all of them, nodes 2n and 2n + 1 for the halves of node n. Who
    overlaps a lifetime is alive when it begins, or begins later in it.
    """

    def __init__(self, last: int) -> None:
        """`last` is the end of the latest lifetime."""
        self._leaves = 1 << (last + 1).bit_length()  # calls begin at -1
        self._alive: defaultdict[int, list[T]] = defaultdict(list)
        """At the few nodes that together are the item's lifetime."""
        self._begun: defaultdict[int, list[T]] = defaultdict(list)
        """At every node that holds the call in which the item begins."""

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
