"""The state of a matching: which node after a pass is which node from before it, as far as `match.py` knows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from functools import cached_property

from passes.graph.op_facts import COMMUTATIVE, first_output
from passes.matching.flat_graph import ABSENT, FlatGraph, Item


class NodeMatching:
    """For each node and value after the pass its counterpart before it, or -1; `match.py` fills it in."""

    def __init__(self, before: FlatGraph, after: FlatGraph) -> None:
        self.before, self.after = before, after
        self.old_of = [-1] * len(after.items)
        self.new_of = [-1] * len(before.items)
        self.value_of = [-1] * len(after.names)
        self.twins: dict[int, set[int]] = {}
        """Meaning → the unmatched old nodes that have it, where several nodes of a model have it."""
        first: dict[int, int] = {}
        # Equal values are one value, under all their names; the first represents them.
        self._representatives = [
            first.setdefault(meaning, value) for value, meaning in enumerate(before.value_meanings)
        ]

    def is_lost(self, old: int) -> bool:
        return self.new_of[old] < 0

    def claim(self, new: int, old: int) -> None:
        self.old_of[new], self.new_of[old] = old, new
        self.twins.get(self.before.items[old].meaning, set()).discard(old)
        for value, old_value in zip(self.after.items[new].makes, self.before.items[old].makes, strict=False):
            if value != ABSENT and old_value != ABSENT:
                self.value_of[value] = old_value

    def may_match(self, new: int, old: int) -> bool:
        """Whether both are unmatched, and `old` is among the twins of `new` if it has any."""
        if self.old_of[new] >= 0 or not self.is_lost(old):
            return False
        twins = self.open_twins(new)
        return not twins or old in twins

    def open_twins(self, new: int) -> set[int]:
        return self.twins.get(self.after.items[new].meaning, set())

    def open_new(self) -> list[int]:
        return [new for new, old in enumerate(self.old_of) if old < 0]

    def open_old(self) -> list[int]:
        return [old for old, new in enumerate(self.new_of) if new < 0]

    def counterpart(self, value: int) -> int:
        """The representative of the old value that a value after the pass is; -1 if it is not known."""
        old = self.value_of[value] if value != ABSENT else ABSENT
        return old if old < 0 else self._representatives[old]

    def representative(self, old_value: int) -> int:
        return old_value if old_value == ABSENT else self._representatives[old_value]

    def values_equal_to(self, old_value: int) -> list[int]:
        """All old values that equal this one: a pass may have merged them."""
        return self._equals[self._representatives[old_value]]

    @cached_property
    def _equals(self) -> dict[int, list[int]]:
        equals: dict[int, list[int]] = defaultdict(list)
        for value, first in enumerate(self._representatives):
            equals[first].append(value)
        return dict(equals)

    # The tables below are built on first use, after the matching by digests, and cover the nodes still unmatched then.

    @cached_property
    def olds_by_reading(self) -> dict[Hashable, list[int]]:
        olds: dict[Hashable, list[int]] = defaultdict(list)
        for old in self.open_old():
            item = self.before.items[old]
            olds[reading_of(item, [self.representative(value) for value in item.needs])].append(old)
        return dict(olds)

    @cached_property
    def olds_by_name(self) -> dict[Hashable, int]:
        return index_unique(self.open_old(), lambda old: handle_of(self.before, old, name_of))

    @cached_property
    def olds_by_result(self) -> dict[Hashable, int]:
        return index_unique(self.open_old(), lambda old: handle_of(self.before, old, result_of))

    @cached_property
    def old_values_by_name(self) -> dict[Hashable, int]:
        return index_unique(range(len(self.before.names)), lambda old: self.before.names[old])


Handle = Callable[[Item], str]


def name_of(item: Item) -> str:
    return item.node.name


def result_of(item: Item) -> str:
    """The name of the first output."""
    return first_output(item.node)


def handle_of(wiring: FlatGraph, place: int, handle: Handle) -> Hashable:
    """The node's op and name, or None if it has no name."""
    name = handle(wiring.items[place])
    return (wiring.items[place].op, name) if name else None


def reading_of(item: Item, needs: list[int]) -> Hashable:
    """A key of op, attributes and the values `needs`; the order of a commutative op's operands does not count."""
    return (item.op, item.settings, *(sorted(needs) if item.op[1] in COMMUTATIVE else needs))


def index_unique(places: Iterable[int], key_of: Callable[[int], Hashable]) -> dict[Hashable, int]:
    """Key → place, of the places whose key is unique."""
    places_by_key: dict[Hashable, list[int]] = defaultdict(list)
    for place in places:
        key = key_of(place)
        if key is not None:
            places_by_key[key].append(place)
    return {key: places[0] for key, places in places_by_key.items() if len(places) == 1}


def is_one_kind(same: NodeMatching, item: Item, old_item: Item) -> bool:
    """Whether both nodes have one op, and weights of one shape where both read weights."""
    if item.op != old_item.op:
        return False
    after, before = same.after, same.before
    pairs = zip(item.needs, old_item.needs, strict=False)
    stored = [(new, old) for new, old in pairs if new in after.shapes and old in before.shapes]
    weights = (pair for pair in stored if pair[0] in after.weights or pair[1] in before.weights)
    return all(after.shapes[new] == before.shapes[old] for new, old in weights)


def is_namesake(same: NodeMatching, new: int, old: int) -> bool:
    """Whether two nodes of one kind have one name, or outputs of one name."""
    item, old_item = same.after.items[new], same.before.items[old]
    return share_name(item, old_item) and is_one_kind(same, item, old_item)


def share_name(item: Item, old_item: Item) -> bool:
    """Whether two nodes, or their first outputs, have one name."""
    return any(handle(item) == handle(old_item) != "" for handle in (name_of, result_of))
