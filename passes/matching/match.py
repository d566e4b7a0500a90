"""Match the nodes of a model with those of the model that a pass made of it.

`before` and `after` are the two models as flat graphs (`passes.matching.flat_graph`), which number their nodes and
values: `old` is the index of a node in `before`, `new` of a node in `after`. A node without a partner is open, and an
old node that stays open is lost. The evidence, strongest first:

1. two nodes compute the same: a digest from the inputs up, which both graphs share, is equal;
2. they are the only ones of their operator and attributes on the same weights;
3. they read the same values, or make a value that matched nodes read at the same position;
4. they have the same name, and a neighbour or the name of their output in common;
5. for values alone: the same name; then the same weights, where one new product replaces lost nodes;
6. nodes that compute the same several times in a model, in their order.

Names come late, since some tools number nodes anew, and then a name belongs to another node.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Final

from passes.graph.op_facts import COMMUTATIVE
from passes.matching.flat_graph import (
    ABSENT,
    FlatGraph,
    Item,
    NodeMatching,
    handle_of,
    index_unique,
    is_namesake,
    is_one_kind,
    name_of,
    reading_of,
    result_of,
)
from passes.matching.replacements import PRODUCTS, find_weight_readers


def match(before: FlatGraph, after: FlatGraph) -> NodeMatching:
    """Match the nodes and values of two graphs whose digests were numbered in one table, so that they compare."""
    same = NodeMatching(before, after)
    _match_by_meaning(same)
    _match_by_weights(same)
    _match_neighbours(same)
    while any(rule(same) for rule in NAMING):
        _match_neighbours(same)
    return same


def _match_by_meaning(same: NodeMatching) -> None:
    """Match nodes that compute the same, where each model has one such node; then equal values, and outputs by name."""
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


def _match_by_weights(same: NodeMatching) -> None:
    """Match nodes that are the only ones of their op and attributes on their weights, in both models."""
    olds = index_unique(same.open_old(), lambda old: _key_by_weights(same.before, same.before.items[old]))
    news = index_unique(same.open_new(), lambda new: _key_by_weights(same.after, same.after.items[new]))
    for key, new in news.items():
        if key in olds:
            same.claim(new, olds[key])


def _key_by_weights(graph: FlatGraph, item: Item) -> Hashable:
    """Operator, attributes and weights of a node; None if it reads no weight."""
    read = tuple(graph.value_meanings[need] if need in graph.weights else ABSENT for need in item.needs)
    return (item.op, item.settings, read) if any(meaning != ABSENT for meaning in read) else None


def _match_neighbours(same: NodeMatching) -> None:
    """Match the neighbours of matched nodes until there is nothing more to match."""
    while _match_downwards(same) + _match_upwards(same):
        pass


def _match_downwards(same: NodeMatching) -> int:
    """Match nodes that read the same values. If several do, a namesake goes first.

    Nodes that compute the same several times in a model wait for better evidence.
    """
    count = 0
    for new in same.open_new():
        item = same.after.items[new]
        key = None if same.open_twins(new) else _known_reading(same, item)
        olds = [old for old in same.olds_by_reading.get(key, ()) if same.is_lost(old)]
        if olds:
            same.claim(new, _namesake(same, item, olds))
            count += 1
    return count


def _known_reading(same: NodeMatching, item: Item) -> Hashable:
    needs = [same.counterpart(value) for value in item.needs]
    if not item.needs or any(old < 0 and value != ABSENT for old, value in zip(needs, item.needs, strict=True)):
        return None
    return reading_of(item, needs)


def _namesake(same: NodeMatching, item: Item, olds: list[int]) -> int:
    for handle in (name_of, result_of):
        for old in olds:
            if handle(item) and handle(item) == handle(same.before.items[old]):
                return old
    return olds[0]


def _match_upwards(same: NodeMatching) -> int:
    """Match nodes that make a value for the same reader at the same place. If several do, a namesake goes first."""
    count = 0
    for new in reversed(same.open_new()):
        for place, value in enumerate(same.after.items[new].makes):
            candidates = sorted(
                set(_values_replaced_by(same, value)), key=lambda old: (not _is_made_by_namesake(same, new, old), old)
            )
            for old_value in candidates:
                if same.value_of[value] < 0:
                    same.value_of[value] = old_value
                count += _match_maker(same, new, place, old_value)
    return count


def _is_made_by_namesake(same: NodeMatching, new: int, old_value: int) -> bool:
    maker = same.before.makers[old_value]
    return maker >= 0 and is_namesake(same, new, maker)


def _values_replaced_by(same: NodeMatching, value: int) -> list[int]:
    """The old values in place of which matched nodes now read `value`."""
    if value == ABSENT:
        return []
    output = same.before.outputs.get(same.after.names[value], ABSENT)
    replaced = [output] if output != ABSENT and same.after.outputs.get(same.after.names[value]) == value else []
    for user, _ in same.after.users[value]:
        if same.old_of[user] >= 0:
            pairs = _values_read_in_same_place(same, same.after.items[user], same.before.items[same.old_of[user]])
            replaced.extend(old for new, old in pairs if new == value)
    return replaced


def _values_read_in_same_place(same: NodeMatching, item: Item, old_item: Item) -> list[tuple[int, int]]:
    """The values (new, old) that two matched nodes read at the same position; commutative operands in any order."""
    if len(item.needs) != len(old_item.needs):
        return []
    if item.op[1] not in COMMUTATIVE:
        pairs = zip(item.needs, old_item.needs, strict=True)
        return [(new, old) for new, old in pairs if ABSENT not in (new, old)]
    # Known operands are paired by value, the others by the operator and attributes of their maker.
    both = itertools.product(item.needs, old_item.needs)
    pairs = [(new, old) for new, old in both if same.counterpart(new) == same.representative(old) != ABSENT]
    paired = {old for _, old in pairs}
    news = [value for value in item.needs if same.counterpart(value) < 0]
    olds = [value for value in old_item.needs if value not in paired]
    if len(news) == len(olds) == 1:
        return [*pairs, (news[0], olds[0])]
    kinds = index_unique(news, lambda value: _settings_of_maker(same.after, value))
    old_kinds = index_unique(olds, lambda value: _settings_of_maker(same.before, value))
    return [*pairs, *((new, old_kinds[kind]) for kind, new in kinds.items() if kind in old_kinds)]


def _settings_of_maker(graph: FlatGraph, value: int) -> Hashable:
    """Op and attributes of the node that makes `value`."""
    maker = graph.makers[value]
    return None if maker < 0 else (graph.items[maker].op, graph.items[maker].settings)


def _match_maker(same: NodeMatching, new: int, place: int, old_value: int) -> int:
    """Match `new`, whose output at `place` replaces `old_value`, with the maker of `old_value` if the two are alike."""
    old = same.before.makers[old_value]
    if old < 0 or not same.may_match(new, old):
        return 0
    item, old_item = same.after.items[new], same.before.items[old]
    if place != old_item.makes.index(old_value) or item.settings != old_item.settings:
        return 0
    if not is_one_kind(same, item, old_item):
        return 0
    same.claim(new, old)
    return 1


def _match_related_namesakes(same: NodeMatching) -> int:
    """Match nodes of one name that also share an input or a reader."""
    return _match_by_name(same, _share_neighbour)


def _match_by_both_names(same: NodeMatching) -> int:
    """Match nodes of one name whose outputs have one name too."""
    return _match_by_name(same, _have_both_names)


def _match_by_name(same: NodeMatching, agree: Callable[[NodeMatching, int, int], bool]) -> int:
    count = 0
    for handle, olds in ((name_of, same.olds_by_name), (result_of, same.olds_by_result)):
        news = index_unique(same.open_new(), lambda new, handle=handle: handle_of(same.after, new, handle))
        for key, new in news.items():
            old = olds.get(key, -1)
            if old < 0 or not same.may_match(new, old):
                continue
            if is_one_kind(same, same.after.items[new], same.before.items[old]) and agree(same, new, old):
                same.claim(new, old)
                count += 1
    return count


def _have_both_names(same: NodeMatching, new: int, old: int) -> bool:
    item, old_item = same.after.items[new], same.before.items[old]
    return all(handle(item) == handle(old_item) != "" for handle in (name_of, result_of))


def _share_neighbour(same: NodeMatching, new: int, old: int) -> bool:
    before, after = same.before, same.after
    read = {same.representative(value) for value in before.items[old].needs if not _is_plain_constant(before, value)}
    if any(same.counterpart(value) in read for value in after.items[new].needs if not _is_plain_constant(after, value)):
        return True
    readers = {user for value in before.items[old].makes if value != ABSENT for user, _ in before.users[value]}
    users = (user for value in after.items[new].makes if value != ABSENT for user, _ in after.users[value])
    return any(same.old_of[user] in readers for user in users)


def _is_plain_constant(graph: FlatGraph, value: int) -> bool:
    """Whether `value` is a constant but no weight: many nodes share an axis, say, by chance."""
    return value in graph.constants and value not in graph.weights


def _match_values_by_name(same: NodeMatching) -> int:
    """Match values whose maker was replaced and whose name was kept."""
    count = 0
    for value, old in enumerate(same.value_of):
        old_value = same.old_values_by_name.get(same.after.names[value], -1) if old < 0 else -1
        if old_value >= 0 and (same.before.makers[old_value] < 0 or same.is_lost(same.before.makers[old_value])):
            same.value_of[value] = old_value
            count += 1
    return count


def _match_values_by_weights(same: NodeMatching) -> int:
    """Match input and output of a new product with those of the lost nodes that read its weights.

    A pass made such a product of several nodes: a Gemm of a MatMul and an Add, say.
    """
    count = 0
    for new in same.open_new():
        item = same.after.items[new]
        if item.op[1] not in PRODUCTS:
            continue
        kin = find_weight_readers(same, item)
        count += _equate(same, item.makes, _outputs_of_group(same, kin))
        if all(same.value_of[value] >= 0 for value in item.needs if value in same.after.weights):
            # If a weight is unknown, `kin` lacks the old node that read it, and the inputs of the group are not known.
            data = [value for value in item.needs if value not in same.after.constants]
            count += _equate(same, data, _inputs_of_group(same, kin))
    return count


def _inputs_of_group(same: NodeMatching, kin: set[int]) -> set[int]:
    needs = {value for old in kin for value in same.before.items[old].needs}
    return {value for value in needs if value not in same.before.constants and same.before.makers[value] not in kin}


def _outputs_of_group(same: NodeMatching, kin: set[int]) -> set[int]:
    makes = {value for old in kin for value in same.before.items[old].makes if value != ABSENT}
    inner = {value for value in makes if any(user in kin for user, _ in same.before.users[value])}
    return makes - inner


def _equate(same: NodeMatching, values: Sequence[int], old_values: set[int]) -> int:
    """Match the only one of `values` with the only one of `old_values`; how many were matched, 0 or 1."""
    if len(values) != 1 or len(old_values) != 1 or values[0] == ABSENT or same.value_of[values[0]] >= 0:
        return 0
    same.value_of[values[0]] = old_values.pop()
    return 1


def _match_twins_in_order(same: NodeMatching) -> int:
    """Match nodes that compute the same and that neither a reader nor a name distinguishes, in order."""
    count = 0
    for new in same.open_new():
        twins = same.open_twins(new)
        if twins:
            same.claim(new, min(twins))
            count += 1
    return count


NAMING: Final = (
    _match_related_namesakes,
    _match_by_both_names,
    _match_values_by_name,
    _match_values_by_weights,
    _match_twins_in_order,
)
"""Rules for what neighbours leave open, the most certain first. They are tried in turn until a rule matches
something."""
