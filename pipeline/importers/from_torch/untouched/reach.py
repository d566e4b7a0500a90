"""What is in reach of some objects, and what each of it held, so that it can be put back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import is_
from typing import Any

from pipeline.importers.from_torch.untouched.entries import Entries, entries_of

__all__ = ["Held", "in_reach", "same"]


@dataclass(frozen=True, slots=True)
class Held:
    """What `item` held."""

    item: Any
    entries: Entries
    was: list[Any]

    @staticmethod
    def by(item: Any, entries: Entries) -> Held:
        read, _ = entries
        return Held(item, entries, read(item))

    def changed(self) -> list[Any]:
        """What came in and what went out; where only the order is another, everything."""
        read, _ = self.entries
        now = read(self.item)
        if same(now, self.was):
            return []
        before, after = {*map(id, self.was)}, {*map(id, now)}
        moved = [*(one for one in now if id(one) not in before), *(one for one in self.was if id(one) not in after)]
        return moved or now

    def put_back(self) -> None:
        _, write = self.entries
        write(self.item, self.was)


def in_reach(roots: Iterable[Any]) -> list[Held]:
    """Containers and plain objects of the user's classes, however nested, each once; `entries_of` knows which kinds."""
    found: list[Held] = []
    seen: set[int] = set()  # `found` keeps them alive, so that no other gets the same id
    ways, pending = cache(entries_of), list(roots)
    while pending:
        item = pending.pop()
        opened = ways(type(item))
        if opened and id(item) not in seen:
            seen.add(id(item))
            here = [Held.by(item, entries) for entries in opened]
            found += here
            pending += chain.from_iterable(held.was for held in here)
    return found


def same(now: Iterable[Any], was: Iterable[Any]) -> bool:
    """Whether they are the very same objects in the same order: what `==` says of a user's objects may be anything."""
    return all(map(is_, chain(now, END), chain(was, END)))


END = (object(),)
