"""Find what a new node replaces: the lost nodes between its inputs and the values that its readers read before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final

from passes.graph.op_facts import PRODUCTS
from passes.matching.flat_graph import ABSENT, Item, NodeMatching, is_namesake

ASKS_FOR_SHAPE: Final = frozenset({"Shape", "Size"})
"""Readers of a shape are off the data path, and often in another module."""


CLUMP: Final = 64
"""The largest clump of new nodes in which each node gets its own replaced nodes."""


@dataclass(frozen=True, slots=True)
class ReplacedNodes:
    """The old nodes that the new nodes `news` replace, by index: the `lost` nodes, and the nodes `around` these."""

    news: frozenset[int]
    lost: tuple[int, ...]
    """Empty where the new nodes were only inserted."""
    around: tuple[int, ...]


def find_replacements(same: NodeMatching) -> list[ReplacedNodes]:
    """The old nodes that each unmatched new node replaces; each new node is in one entry.

    A node that replaces nothing but its namesake is matched with it: it is not new.
    """
    replacements: list[ReplacedNodes] = []
    for clump in _clumps(same):
        # In a large clump, the replaced nodes of a single new node take long to find, and are nearly those of all.
        shares = [clump] if len(clump) > CLUMP else [{new} for new in sorted(clump)]
        for share in shares:
            together = _replaced_by(same, share)
            products = _products_among(same, together) if len(clump) > 1 else []
            in_products = {new for product in products for new in product.news}
            if share - in_products:
                replacements.append(replace(together, news=together.news - in_products))
            replacements.extend(products)
    news = [replacement for replacement in replacements if not _is_namesake_alone(same, replacement)]
    return [replace(replacement, lost=tuple(filter(same.is_lost, replacement.lost))) for replacement in news]


def _is_namesake_alone(same: NodeMatching, replacement: ReplacedNodes) -> bool:
    if len(replacement.news) != 1 or len(replacement.lost) != 1:
        return False
    [new], [old] = replacement.news, replacement.lost
    if not same.is_lost(old) or not is_namesake(same, new, old):
        return False
    same.claim(new, old)
    return True


def _clumps(same: NodeMatching) -> list[set[int]]:
    """Clumps of new nodes: nodes that unmatched values connect are in one clump."""
    clumps: list[set[int]] = []
    seen: set[int] = set()
    for new in same.open_new():
        if new not in seen:
            clumps.append(_through_new(same, {new}, lambda item: _unknown_neighbours(same, item)))
            seen |= clumps[-1]
    return clumps


def _replaced_by(same: NodeMatching, share: set[int]) -> ReplacedNodes:
    items = same.before.items
    entries = _entries(same, share)
    exits = {_without_identities(same, value) for value in _exits(same, share)}
    ends = {equal for value in entries for equal in same.values_equal_to(value)}
    back = _reach(exits - ends, ends, lambda value: _lost_maker(same, value), lambda old: items[old].needs)
    forth = _reach(ends, exits, lambda value: _lost_readers(same, value), lambda old: items[old].makes)
    makers = (same.before.makers[value] for value in entries)
    readers = (user for value in exits for user, _ in same.before.users[value])
    around = {old for old in (*makers, *readers) if old >= 0}
    return ReplacedNodes(frozenset(share), tuple(sorted(back & forth or back)), tuple(sorted(around)))


def _products_among(same: NodeMatching, replacement: ReplacedNodes) -> list[ReplacedNodes]:
    """The new products of weights, each with the lost nodes that used only these weights.

    The other new nodes of `replacement` replace the lost nodes before and after the product: a Reshape before the new
    product replaces the Reshape before the old product.
    """
    products = []
    for new in sorted(replacement.news):
        item = same.after.items[new]
        if item.op[1] not in PRODUCTS:
            continue
        readers = find_weight_readers(same, item, among=set(replacement.lost))
        if readers:
            lost = [old for old in replacement.lost if old in readers or _feeds_constant(same, old, readers)]
            products.append(ReplacedNodes(frozenset({new}), tuple(lost), replacement.around))
    return products


def _feeds_constant(same: NodeMatching, old: int, readers: set[int]) -> bool:
    """Whether a node makes a constant that one of `readers` reads, such as a transposed weight."""
    before = same.before
    front = [value for value in before.items[old].makes if value in before.constants]
    while front:
        for user, _ in before.users[front.pop()]:
            if user in readers:
                return True
            front.extend(value for value in before.items[user].makes if value in before.constants)
    return False


def _without_identities(same: NodeMatching, old_value: int) -> int:
    """The value before the lost identities that passed it on: nothing has to replace them."""
    maker = same.before.makers[old_value]
    while maker >= 0 and same.is_lost(maker):
        passed = same.before.items[maker].needs
        if not passed or passed[0] == ABSENT or same.representative(passed[0]) != same.representative(old_value):
            break
        old_value = passed[0]
        maker = same.before.makers[old_value]
    return old_value


def _entries(same: NodeMatching, share: set[int]) -> set[int]:
    """The old values that new nodes read, directly or through other new nodes."""
    places = _through_new(same, share, lambda item: _unknown_makers(same, item))
    read = (value for place in places for value in same.after.items[place].needs if value != ABSENT)
    return {same.value_of[value] for value in read if same.value_of[value] >= 0}


def _exits(same: NodeMatching, share: set[int]) -> set[int]:
    """The old values that outputs of new nodes replace, directly or through other new nodes."""
    after = same.after
    places = _through_new(same, share, lambda item: _unknown_readers(same, item))
    values = {value for place in places for value in after.items[place].makes if value != ABSENT}
    exits = {same.value_of[value] for value in values if same.value_of[value] >= 0}
    for user, position in (pair for value in values if same.value_of[value] < 0 for pair in after.users[value]):
        needs = same.before.items[same.old_of[user]].needs if same.old_of[user] >= 0 else ()
        if len(needs) == len(after.items[user].needs) and needs[position] != ABSENT:
            exits.add(needs[position])
    return exits


def _unknown_makers(same: NodeMatching, item: Item) -> list[int]:
    """The makers of the unknown values that a node reads."""
    makers = (same.after.makers[value] for value in item.needs if value != ABSENT and same.value_of[value] < 0)
    return [maker for maker in makers if maker >= 0]


def _unknown_readers(same: NodeMatching, item: Item) -> list[int]:
    """The readers of the unknown values that a node makes."""
    unknown = (value for value in item.makes if value != ABSENT and same.value_of[value] < 0)
    return [user for value in unknown for user, _ in same.after.users[value]]


def _unknown_neighbours(same: NodeMatching, item: Item) -> list[int]:
    return [*_unknown_makers(same, item), *_unknown_readers(same, item)]


def _through_new(same: NodeMatching, start: set[int], onwards: Callable[[Item], Iterable[int]]) -> set[int]:
    seen, front = set(start), list(start)
    while front:
        for place in onwards(same.after.items[front.pop()]):
            if place not in seen and same.old_of[place] < 0:
                seen.add(place)
                front.append(place)
    return seen


def _reach(
    start: Iterable[int],
    stop: set[int],
    nodes_at: Callable[[int], Iterable[int]],
    values_at: Callable[[int], Iterable[int]],
) -> set[int]:
    """Nodes of the model before that are reached from the values `start` without passing a value in `stop`."""
    seen: set[int] = set()
    front = list(start)
    while front:
        for old in nodes_at(front.pop()):
            if old not in seen:
                seen.add(old)
                front.extend(value for value in values_at(old) if value != ABSENT and value not in stop)
    return seen


def _lost_maker(same: NodeMatching, value: int) -> list[int]:
    maker = same.before.makers[value]
    return [maker] if maker >= 0 and same.is_lost(maker) else []


def _lost_readers(same: NodeMatching, value: int) -> list[int]:
    """The lost readers of a value, without those that only ask for its shape."""
    readers = [user for user, _ in same.before.users[value] if same.is_lost(user)]
    return [user for user in readers if same.before.items[user].op[1] not in ASKS_FOR_SHAPE]


def find_weight_readers(same: NodeMatching, item: Item, among: AbstractSet[int] | None = None) -> set[int]:
    """The lost nodes that read the weights of `item`, a node after the pass; empty where that is ambiguous.

    A weight with one reader, under all its names, is certain. Layers may share a weight, and a pass merges equal
    weights, such as biases of zeros: of several readers, the right reader is the only neighbour of
    the certain readers. With
    `among`, only these nodes count.
    """
    weights = (same.value_of[value] for value in item.needs if value in same.after.weights)
    readings = [_readers_of(same, value) for value in weights if value >= 0]
    if among is not None:
        readings = [readers & among for readers in readings]
    certain = {old for readers in readings if len(readers) == 1 for old in readers}
    readers_of_all = set(certain)
    for readers in readings:
        beside = {
            old for old in readers if old in certain or any(_is_beside(same, old, neighbour) for neighbour in certain)
        }
        if len(beside) != 1:
            return set()
        readers_of_all |= beside
    return readers_of_all if all(map(same.is_lost, readers_of_all)) else set()


def _readers_of(same: NodeMatching, old_value: int) -> set[int]:
    """The nodes that compute with a weight, under any of its names or through constants computed from it."""
    before = same.before
    users: set[int] = set()
    seen: set[int] = set()
    front = [old_value]
    while front:
        for value in same.values_equal_to(front.pop()):
            if value in seen:
                continue
            seen.add(value)
            for user, _ in before.users[value]:
                makes = [result for result in before.items[user].makes if result != ABSENT]
                if all(result in before.constants for result in makes):
                    front.extend(makes)
                else:
                    users.add(user)
    return users


def _is_beside(same: NodeMatching, old: int, other: int) -> bool:
    """Whether one of the two nodes reads what the other one makes."""
    first, second = same.before.items[old], same.before.items[other]
    return not set(first.makes).isdisjoint(second.needs) or not set(second.makes).isdisjoint(first.needs)
