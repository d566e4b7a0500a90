"""Nodes matched by what they compute, whatever they are called."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable

from passes.graph.op_facts import COMMUTATIVE
from passes.provenance.same import Same, alone, is_namesake, is_one_kind, name_of, reading_of, result_of
from passes.provenance.wiring import ABSENT, Item, Wiring

__all__ = ["by_meaning", "by_readers", "by_weights", "spread"]


def by_meaning(same: Same) -> None:
    """Nodes that compute the same from the inputs up, where there is one of them; values that mean the same."""
    before, after = same.before, same.after
    olds: dict[int, list[int]] = defaultdict(list)
    news: dict[int, list[int]] = defaultdict(list)
    for old, item in enumerate(before.items):
        olds[item.meaning].append(old)
    for new, item in enumerate(after.items):
        news[item.meaning].append(new)
    for meaning in news.keys() & olds.keys():
        if len(news[meaning]) == len(olds[meaning]) == 1:
            same.claim(news[meaning][0], olds[meaning][0])
        else:
            same.twins[meaning] = set(olds[meaning])
    values: dict[int, int] = {}
    for value, meaning in enumerate(before.value_meanings):
        values.setdefault(meaning, value)
    for value, meaning in enumerate(after.value_meanings):
        if same.value_of[value] < 0:
            same.value_of[value] = values.get(meaning, -1)
    for name, value in after.outputs.items():
        if same.value_of[value] < 0:
            same.value_of[value] = before.outputs.get(name, -1)


def by_readers(same: Same) -> None:
    """Of twins, the one whose result goes to the same places. `spread` would find it too, one after the other."""
    twins = {old for olds in same.twins.values() for old in olds}
    olds = alone(twins, lambda old: _readers(same.before, old))
    news = [new for new in same.open_new() if same.after.items[new].meaning in same.twins]
    for key, new in alone(news, lambda new: _readers(same.after, new)).items():
        if key in olds:
            same.claim(new, olds[key])


def _readers(wiring: Wiring, place: int) -> Hashable:
    item = wiring.items[place]
    read = [(wiring.items[user].meaning, at) for one in item.makes if one != ABSENT for user, at in wiring.users[one]]
    return (item.meaning, frozenset(read)) if read else None


def by_weights(same: Same) -> None:
    """The only node of its op and attributes on these weights, in both models."""
    olds = alone(same.open_old(), lambda old: _weights(same.before, same.before.items[old]))
    news = alone(same.open_new(), lambda new: _weights(same.after, same.after.items[new]))
    for key, new in news.items():
        if key in olds:
            same.claim(new, olds[key])


def _weights(wiring: Wiring, item: Item) -> Hashable:
    told = tuple(wiring.value_meanings[one] if one in wiring.weights else ABSENT for one in item.needs)
    return (item.op, item.settings, told) if any(one != ABSENT for one in told) else None


def spread(same: Same) -> None:
    """From what is matched to what lies beside it, until nothing more is found."""
    while _downwards(same) + _upwards(same):
        pass


def _downwards(same: Same) -> int:
    """Nodes that read the same values. If several read them, a namesake goes first."""
    count = 0
    for new in same.open_new():
        item = same.after.items[new]
        key = None if same.open_twins(new) else _known_reading(same, item)
        olds = [old for old in same.olds_by_reading.get(key, ()) if same.lost(old)]
        if olds:
            same.claim(new, _namesake(same, item, olds))
            count += 1
    return count


def _known_reading(same: Same, item: Item) -> Hashable:
    needs = [same.known(one) for one in item.needs]
    if not item.needs or any(old < 0 and one != ABSENT for old, one in zip(needs, item.needs, strict=True)):
        return None
    return reading_of(item, needs)


def _namesake(same: Same, item: Item, olds: list[int]) -> int:
    for handle in (name_of, result_of):
        for old in olds:
            if handle(item) and handle(item) == handle(same.before.items[old]):
                return old
    return olds[0]


def _upwards(same: Same) -> int:
    """Nodes that make a value for the same reader at the same place. If several do, a namesake goes first."""
    count = 0
    for new in reversed(same.open_new()):
        for place, value in enumerate(same.after.items[new].makes):
            wanted = sorted(set(_wanted(same, value)), key=lambda old: (not _is_made_by_namesake(same, new, old), old))
            for old_value in wanted:
                if same.value_of[value] < 0:
                    same.value_of[value] = old_value
                count += _meet(same, new, place, old_value)
    return count


def _is_made_by_namesake(same: Same, new: int, old_value: int) -> bool:
    maker = same.before.makers[old_value]
    return maker >= 0 and is_namesake(same, new, maker)


def _wanted(same: Same, value: int) -> list[int]:
    """What those that read `value` read there before."""
    if value == ABSENT:
        return []
    given = same.before.outputs.get(same.after.names[value], ABSENT)
    found = [given] if given != ABSENT and same.after.outputs.get(same.after.names[value]) == value else []
    for user, _ in same.after.users[value]:
        if same.old_of[user] >= 0:
            pairs = _opposite(same, same.after.items[user], same.before.items[same.old_of[user]])
            found.extend(old for one, old in pairs if one == value)
    return found


def _opposite(same: Same, item: Item, old_item: Item) -> list[tuple[int, int]]:
    """The values that two matched nodes read in the same place."""
    if len(item.needs) != len(old_item.needs):
        return []
    if item.op[1] not in COMMUTATIVE:
        pairs = zip(item.needs, old_item.needs, strict=True)
        return [(one, other) for one, other in pairs if ABSENT not in (one, other)]
    # In any order: what is known goes by what it means, the rest by what makes it.
    both = itertools.product(item.needs, old_item.needs)
    pairs = [(one, other) for one, other in both if same.known(one) == same.alike(other) != ABSENT]
    told = {other for _, other in pairs}
    ones = [one for one in item.needs if same.known(one) < 0]
    others = [other for other in old_item.needs if other not in told]
    if len(ones) == len(others) == 1:
        return [*pairs, (ones[0], others[0])]
    kinds = alone(ones, lambda one: _kind(same.after, one))
    old_kinds = alone(others, lambda one: _kind(same.before, one))
    return [*pairs, *((one, old_kinds[kind]) for kind, one in kinds.items() if kind in old_kinds)]


def _kind(wiring: Wiring, value: int) -> Hashable:
    """Op and attributes of what makes `value`."""
    maker = wiring.makers[value]
    return None if maker < 0 else (wiring.items[maker].op, wiring.items[maker].settings)


def _meet(same: Same, new: int, place: int, old_value: int) -> int:
    """Match `new`, whose output at `place` stands where `old_value` did, with its maker if that is of the same kind."""
    old = same.before.makers[old_value]
    if old < 0 or not same.may_be(new, old):
        return 0
    item, old_item = same.after.items[new], same.before.items[old]
    if place != old_item.makes.index(old_value) or item.settings != old_item.settings:
        return 0
    if not is_one_kind(same, item, old_item):
        return 0
    same.claim(new, old)
    return 1
