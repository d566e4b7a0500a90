"""Which node after a pass is which one from before it: what is known so far, while `match.py` finds out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from functools import cached_property

from passes.graph.op_facts import COMMUTATIVE
from passes.matching.graph_index import ABSENT, GraphIndex, Item

__all__ = [
    "NodeMatching",
    "alone",
    "handle_of",
    "is_namesake",
    "is_one_kind",
    "name_of",
    "reading_of",
    "result_of",
    "share_name",
]


class NodeMatching:
    """What is known so far: for each node and value after the pass its counterpart before it, or -1."""

    def __init__(self, before: GraphIndex, after: GraphIndex) -> None:
        self.before, self.after = before, after
        self.old_of = [-1] * len(after.items)
        self.new_of = [-1] * len(before.items)
        self.value_of = [-1] * len(after.names)
        self.twins: dict[int, set[int]] = {}
        """Meaning → the open old nodes that share it, where there were several of them or of the new ones."""
        first: dict[int, int] = {}
        # Values that mean the same are one value, by whatever name they are read.
        self._alike = [first.setdefault(meaning, one) for one, meaning in enumerate(before.value_meanings)]

    def lost(self, old: int) -> bool:
        return self.new_of[old] < 0

    def claim(self, new: int, old: int) -> None:
        self.old_of[new], self.new_of[old] = old, new
        self.twins.get(self.before.items[old].meaning, set()).discard(old)
        for one, other in zip(self.after.items[new].makes, self.before.items[old].makes, strict=False):
            if one != ABSENT and other != ABSENT:
                self.value_of[one] = other

    def may_be(self, new: int, old: int) -> bool:
        """Whether both are free, and `old` is among the twins of `new` as long as it has any."""
        if self.old_of[new] >= 0 or not self.lost(old):
            return False
        twins = self.open_twins(new)
        return not twins or old in twins

    def open_twins(self, new: int) -> set[int]:
        return self.twins.get(self.after.items[new].meaning, set())

    def open_new(self) -> list[int]:
        return [new for new, old in enumerate(self.old_of) if old < 0]

    def open_old(self) -> list[int]:
        return [old for old, new in enumerate(self.new_of) if new < 0]

    def known(self, value: int) -> int:
        """A value after the pass as one from before it, equal ones as one; -1 if it is not known."""
        old = self.value_of[value] if value != ABSENT else ABSENT
        return old if old < 0 else self._alike[old]

    def alike(self, old_value: int) -> int:
        return old_value if old_value == ABSENT else self._alike[old_value]

    def equals(self, old_value: int) -> list[int]:
        """All values from before the pass that mean the same as this one: a pass may have made one of them."""
        return self._equals[self._alike[old_value]]

    @cached_property
    def _equals(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for value, first in enumerate(self._alike):
            found[first].append(value)
        return dict(found)

    # What follows is asked for once the digests have done their part, and covers the nodes that were lost by then.

    @cached_property
    def olds_by_reading(self) -> dict[Hashable, list[int]]:
        found: dict[Hashable, list[int]] = defaultdict(list)
        for old in self.open_old():
            item = self.before.items[old]
            found[reading_of(item, [self.alike(one) for one in item.needs])].append(old)
        return dict(found)

    @cached_property
    def olds_by_name(self) -> dict[Hashable, int]:
        return alone(self.open_old(), lambda old: handle_of(self.before, old, name_of))

    @cached_property
    def olds_by_result(self) -> dict[Hashable, int]:
        return alone(self.open_old(), lambda old: handle_of(self.before, old, result_of))

    @cached_property
    def old_values_by_name(self) -> dict[Hashable, int]:
        return alone(range(len(self.before.names)), lambda old: self.before.names[old])


Handle = Callable[[Item], str]


def name_of(item: Item) -> str:
    return item.node.name


def result_of(item: Item) -> str:
    """The name of its first output."""
    return next((name for name in item.node.output if name), "")


def handle_of(wiring: GraphIndex, place: int, handle: Handle) -> Hashable:
    """The node's op and name, or None if it has no name."""
    name = handle(wiring.items[place])
    return (wiring.items[place].op, name) if name else None


def reading_of(item: Item, needs: list[int]) -> Hashable:
    """Its op and attributes on the values `needs`, in an order that does not count where it does not matter."""
    return (item.op, item.settings, *(sorted(needs) if item.op[1] in COMMUTATIVE else needs))


def alone(places: Iterable[int], key_of: Callable[[int], Hashable]) -> dict[Hashable, int]:
    """Key → place, for those whose key no other place has."""
    found: dict[Hashable, list[int]] = defaultdict(list)
    for place in places:
        key = key_of(place)
        if key is not None:
            found[key].append(place)
    return {key: places[0] for key, places in found.items() if len(places) == 1}


def is_one_kind(same: NodeMatching, item: Item, old_item: Item) -> bool:
    """Of one op, and where both read weights, of one shape."""
    if item.op != old_item.op:
        return False
    after, before = same.after, same.before
    pairs = zip(item.needs, old_item.needs, strict=False)
    stored = [(one, other) for one, other in pairs if one in after.shapes and other in before.shapes]
    told = (pair for pair in stored if pair[0] in after.weights or pair[1] in before.weights)
    return all(after.shapes[one] == before.shapes[other] for one, other in told)


def is_namesake(same: NodeMatching, new: int, old: int) -> bool:
    """Whether two nodes of one kind have one name, or outputs of one name."""
    item, old_item = same.after.items[new], same.before.items[old]
    return share_name(item, old_item) and is_one_kind(same, item, old_item)


def share_name(item: Item, old_item: Item) -> bool:
    """Whether two nodes, or their first outputs, have one name."""
    return any(handle(item) == handle(old_item) != "" for handle in (name_of, result_of))
