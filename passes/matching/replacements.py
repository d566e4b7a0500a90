"""Find what a new node replaces: the lost nodes between its inputs and the values that its consumers read before.

`match_models` matches two models with that: their nodes, values, inputs and outputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from onnx import GraphProto, ValueInfoProto

from passes.graph.formatting import format_type
from passes.graph.index import required_inputs
from passes.graph.op_facts import PRODUCTS
from passes.matching.flat_graph import (
    ABSENT,
    Item,
    NodeMatching,
    NodeMeanings,
    flatten_graph,
    is_namesake,
    is_one_kind,
    share_name,
)
from passes.matching.match import match
from passes.model.canonical import CanonicalGraph, read
from passes.weights.detached import DetachedModel

ASKS_FOR_SHAPE: Final = frozenset({"Shape", "Size"})
"""Readers of a shape are off the data path, and often in another module."""


CLUMP: Final = 64
"""The largest clump of new nodes in which each node gets its own replaced nodes."""


@dataclass(frozen=True, slots=True)
class ReplacedNodes:
    """The old nodes that some new nodes replace, by place in the model before: lost ones, and those around them."""

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
        # In a large clump the share of a single node is expensive to find, and nearly the whole clump.
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
    """The new nodes in sets that new values connect."""
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


@dataclass(frozen=True)
class ModelMatching:
    """Two models, with the counterparts of their nodes and values.

    `groups` are the nodes without a counterpart, as (places in the model before, places in the one after): nodes are in
    one group with the nodes that they replace.
    """

    before: DetachedModel
    after: DetachedModel
    readings: tuple[CanonicalGraph, CanonicalGraph]
    inputs: Mapping[str, str]
    """Input of the model after → the input of the model before that it is."""
    same: NodeMatching
    groups: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    @cached_property
    def old_meanings(self) -> frozenset[int]:
        """The meanings of all values in the model before."""
        return frozenset(self.same.before.value_meanings)

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Places of the nodes that are in both, as (before, after), in the order of the second model."""
        return ((old, new) for new, old in enumerate(self.same.old_of) if old >= 0)

    def is_same_value(self, old: int, new: int) -> bool:
        """Whether both are one value, or differ because of added or removed nodes, which are listed themselves."""
        same = self.same
        known = same.counterpart(new)
        if same.before.makers[old] < 0 and same.after.makers[new] < 0:  # inputs, and what is stored
            return same.before.value_meanings[old] == same.after.value_meanings[new]
        if known >= 0:
            return known == same.representative(old) or known in self._behind_lost(old)
        maker = same.after.makers[new]
        return maker >= 0 and same.old_of[maker] < 0

    def _behind_lost(self, value: int) -> set[int]:
        """The values that lost nodes computed `value` from: a pass that removes such a node passes one of them on."""
        same, values, front = self.same, set(), [value]
        while front:
            maker = same.before.makers[front.pop()]
            if maker >= 0 and same.is_lost(maker):
                needs = [
                    value
                    for value in same.before.items[maker].needs
                    if value != ABSENT and same.representative(value) not in values
                ]
                values.update(map(same.representative, needs))
                front.extend(needs)
        return values


def match_models(
    before: DetachedModel, after: DetachedModel, readings: tuple[CanonicalGraph, CanonicalGraph] | None = None
) -> ModelMatching:
    """Match two models; `readings` are their canonical graphs, if there are any already."""
    first, second = readings or (read(before), read(after))
    inputs = _pair_values(required_inputs(before.proto.graph), required_inputs(after.proto.graph))
    meanings: NodeMeanings = {}
    same = match(flatten_graph(before, first, meanings), flatten_graph(after, second, meanings, inputs))
    groups = _groups(same)
    for olds, news in groups:
        _pair(same, olds, news)
    left = [
        (tuple(filter(same.is_lost, olds)), tuple(new for new in news if same.old_of[new] < 0)) for olds, news in groups
    ]
    return ModelMatching(before, after, (first, second), inputs, same, tuple(group for group in left if any(group)))


def _groups(same: NodeMatching) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Group unmatched nodes: new nodes that replace some of the same old nodes share a group."""
    replacements = [(set(replacement.lost), set(replacement.news)) for replacement in find_replacements(same)]
    merged: list[tuple[set[int], set[int]]] = []
    for olds, news in replacements:
        separate = []
        for group in merged:
            if group[0].isdisjoint(olds):
                separate.append(group)
            else:
                olds, news = olds | group[0], news | group[1]
        merged = [*separate, (olds, news)]
    replaced = {old for olds, _ in merged for old in olds}
    alone = [({old}, set()) for old in same.open_old() if old not in replaced]
    groups = [(tuple(sorted(olds)), tuple(sorted(news))) for olds, news in (*merged, *alone)]
    return sorted(groups, key=lambda group: (group[1] or group[0])[0])


def _pair(same: NodeMatching, olds: tuple[int, ...], news: tuple[int, ...]) -> None:
    """Match a new node with the lost node of its kind that it replaces, or of its operator and name."""
    kinds: dict[tuple[str, str], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for old in filter(same.is_lost, olds):
        kinds[same.before.items[old].op][0].append(old)
    for new in news:
        if same.old_of[new] < 0:
            kinds[same.after.items[new].op][1].append(new)
    for those, these in kinds.values():
        if len(those) == len(these) == 1 and _is_one(same, those[0], these[0]):
            same.claim(these[0], those[0])


def _is_one(same: NodeMatching, old: int, new: int) -> bool:
    item, old_item = same.after.items[new], same.before.items[old]
    return is_one_kind(same, item, old_item) or share_name(item, old_item)


def same_outputs(before: GraphProto, after: GraphProto) -> Mapping[str, str]:
    """Output of `after` → output of `before`."""
    return _pair_values(list(before.output), list(after.output))


def _pair_values(olds: list[ValueInfoProto], news: list[ValueInfoProto]) -> dict[str, str]:
    known = {info.name for info in olds} & {info.name for info in news}
    old_rest, new_rest = ([info for info in infos if info.name not in known] for infos in (olds, news))
    names = {info.name: info.name for info in news if info.name in known}
    if len(old_rest) == len(new_rest):  # otherwise it is unclear which were added and which removed
        pairs = zip(old_rest, new_rest, strict=True)
        names |= {new.name: old.name for old, new in pairs if format_type(old) == format_type(new)}
    return names
