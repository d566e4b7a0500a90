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
    input_key_of,
    is_namesake,
    is_one_kind,
    name_of,
    result_of,
)
from passes.matching.replacements import PRODUCTS, find_weight_consumers


def match(before: FlatGraph, after: FlatGraph) -> NodeMatching:
    """Match the nodes and values of two graphs whose digests were numbered in one table, so that they compare."""
    matching = NodeMatching(before, after)
    _match_by_digest(matching)
    _match_by_weights(matching)
    _match_neighbours(matching)
    while any(rule(matching) for rule in NAMING):
        _match_neighbours(matching)
    return matching


def _match_by_digest(matching: NodeMatching) -> None:
    """Match nodes that compute the same, where each model has one such node; then equal values, and outputs by name."""
    before, after = matching.before, matching.after
    olds: dict[int, list[int]] = defaultdict(list)
    news: dict[int, list[int]] = defaultdict(list)
    for old, item in enumerate(before.items):
        olds[item.digest].append(old)
    for new, item in enumerate(after.items):
        news[item.digest].append(new)
    for digest in news.keys() & olds.keys():
        if len(news[digest]) == len(olds[digest]) == 1:
            matching.claim(news[digest][0], olds[digest][0])
        else:
            matching.duplicates[digest] = set(olds[digest])
    values: dict[int, int] = {}
    for value, digest in enumerate(before.value_digests):
        values.setdefault(digest, value)
    for value, digest in enumerate(after.value_digests):
        if matching.value_of[value] < 0:
            matching.value_of[value] = values.get(digest, -1)
    for name, value in after.outputs.items():
        if matching.value_of[value] < 0:
            matching.value_of[value] = before.outputs.get(name, -1)


def _match_by_weights(matching: NodeMatching) -> None:
    """Match nodes that are the only ones of their op and attributes on their weights, in both models."""
    olds = index_unique(matching.open_old(), lambda old: _key_by_weights(matching.before, matching.before.items[old]))
    news = index_unique(matching.open_new(), lambda new: _key_by_weights(matching.after, matching.after.items[new]))
    for key, new in news.items():
        if key in olds:
            matching.claim(new, olds[key])


def _key_by_weights(graph: FlatGraph, item: Item) -> Hashable:
    """Operator, attributes and weights of a node; None if it reads no weight."""
    read = tuple(graph.value_digests[value] if value in graph.weights else ABSENT for value in item.inputs)
    return (item.op, item.op_digest, read) if any(digest != ABSENT for digest in read) else None


def _match_neighbours(matching: NodeMatching) -> None:
    """Match the neighbours of matched nodes until there is nothing more to match."""
    while _match_downwards(matching) + _match_upwards(matching):
        pass


def _match_downwards(matching: NodeMatching) -> int:
    """Match nodes that read the same values. If several do, a namesake goes first.

    Nodes that compute the same several times in a model wait for better evidence.
    """
    count = 0
    for new in matching.open_new():
        item = matching.after.items[new]
        key = None if matching.open_duplicates(new) else _known_input_key(matching, item)
        olds = [old for old in matching.olds_by_inputs.get(key, ()) if matching.is_lost(old)]
        if olds:
            matching.claim(new, _namesake(matching, item, olds))
            count += 1
    return count


def _known_input_key(matching: NodeMatching, item: Item) -> Hashable:
    inputs = [matching.counterpart(value) for value in item.inputs]
    if not item.inputs or any(old < 0 and value != ABSENT for old, value in zip(inputs, item.inputs, strict=True)):
        return None
    return input_key_of(item, inputs)


def _namesake(matching: NodeMatching, item: Item, olds: list[int]) -> int:
    for handle in (name_of, result_of):
        for old in olds:
            if handle(item) and handle(item) == handle(matching.before.items[old]):
                return old
    return olds[0]


def _match_upwards(matching: NodeMatching) -> int:
    """Match nodes that make a value for the same consumer at the same position; of several, a namesake goes first."""
    count = 0
    for new in reversed(matching.open_new()):
        for index, value in enumerate(matching.after.items[new].outputs):
            candidates = sorted(
                set(_values_replaced_by(matching, value)),
                key=lambda old: (not _is_made_by_namesake(matching, new, old), old),
            )
            for old_value in candidates:
                if matching.value_of[value] < 0:
                    matching.value_of[value] = old_value
                count += _match_producer(matching, new, index, old_value)
    return count


def _is_made_by_namesake(matching: NodeMatching, new: int, old_value: int) -> bool:
    producer = matching.before.producers[old_value]
    return producer >= 0 and is_namesake(matching, new, producer)


def _values_replaced_by(matching: NodeMatching, value: int) -> list[int]:
    """The old values in place of which matched nodes now read `value`."""
    if value == ABSENT:
        return []
    output = matching.before.outputs.get(matching.after.names[value], ABSENT)
    replaced = [output] if output != ABSENT and matching.after.outputs.get(matching.after.names[value]) == value else []
    for consumer, _ in matching.after.uses[value]:
        old = matching.old_of[consumer]
        if old >= 0:
            pairs = _values_read_at_same_position(matching, matching.after.items[consumer], matching.before.items[old])
            replaced.extend(old for new, old in pairs if new == value)
    return replaced


def _values_read_at_same_position(matching: NodeMatching, item: Item, old_item: Item) -> list[tuple[int, int]]:
    """The values (new, old) that two matched nodes read at the same position; commutative operands in any order."""
    if len(item.inputs) != len(old_item.inputs):
        return []
    if item.op[1] not in COMMUTATIVE:
        pairs = zip(item.inputs, old_item.inputs, strict=True)
        return [(new, old) for new, old in pairs if ABSENT not in (new, old)]
    # Known operands are paired by value, the others by the operator and attributes of their producer.
    both = itertools.product(item.inputs, old_item.inputs)
    pairs = [(new, old) for new, old in both if matching.counterpart(new) == matching.representative(old) != ABSENT]
    paired = {old for _, old in pairs}
    news = [value for value in item.inputs if matching.counterpart(value) < 0]
    olds = [value for value in old_item.inputs if value not in paired]
    if len(news) == len(olds) == 1:
        return [*pairs, (news[0], olds[0])]
    kinds = index_unique(news, lambda value: _op_of_producer(matching.after, value))
    old_kinds = index_unique(olds, lambda value: _op_of_producer(matching.before, value))
    return [*pairs, *((new, old_kinds[kind]) for kind, new in kinds.items() if kind in old_kinds)]


def _op_of_producer(graph: FlatGraph, value: int) -> Hashable:
    """Op and attributes of the node that makes `value`."""
    producer = graph.producers[value]
    return None if producer < 0 else (graph.items[producer].op, graph.items[producer].op_digest)


def _match_producer(matching: NodeMatching, new: int, index: int, old_value: int) -> int:
    """Match `new`, whose output at `index` replaces `old_value`, with the producer of that value if both are alike."""
    old = matching.before.producers[old_value]
    if old < 0 or not matching.may_match(new, old):
        return 0
    item, old_item = matching.after.items[new], matching.before.items[old]
    if index != old_item.outputs.index(old_value) or item.op_digest != old_item.op_digest:
        return 0
    if not is_one_kind(matching, item, old_item):
        return 0
    matching.claim(new, old)
    return 1


def _match_related_namesakes(matching: NodeMatching) -> int:
    """Match nodes of one name that also share an input or a consumer."""
    return _match_by_name(matching, _share_neighbour)


def _match_by_both_names(matching: NodeMatching) -> int:
    """Match nodes of one name whose outputs have one name too."""
    return _match_by_name(matching, _have_both_names)


def _match_by_name(matching: NodeMatching, agree: Callable[[NodeMatching, int, int], bool]) -> int:
    count = 0
    for handle, olds in ((name_of, matching.olds_by_name), (result_of, matching.olds_by_result)):
        news = index_unique(matching.open_new(), lambda new, handle=handle: handle_of(matching.after, new, handle))
        for key, new in news.items():
            old = olds.get(key, -1)
            if old < 0 or not matching.may_match(new, old):
                continue
            item, old_item = matching.after.items[new], matching.before.items[old]
            if is_one_kind(matching, item, old_item) and agree(matching, new, old):
                matching.claim(new, old)
                count += 1
    return count


def _have_both_names(matching: NodeMatching, new: int, old: int) -> bool:
    item, old_item = matching.after.items[new], matching.before.items[old]
    return all(handle(item) == handle(old_item) != "" for handle in (name_of, result_of))


def _share_neighbour(matching: NodeMatching, new: int, old: int) -> bool:
    before, after = matching.before, matching.after
    read = {matching.representative(value) for value in before.items[old].inputs if not _is_plain(before, value)}
    if any(matching.counterpart(value) in read for value in after.items[new].inputs if not _is_plain(after, value)):
        return True
    olds = {consumer for value in before.items[old].outputs if value != ABSENT for consumer, _ in before.uses[value]}
    news = (consumer for value in after.items[new].outputs if value != ABSENT for consumer, _ in after.uses[value])
    return any(matching.old_of[consumer] in olds for consumer in news)


def _is_plain(graph: FlatGraph, value: int) -> bool:
    """Whether `value` is a constant but no weight: many nodes share an axis, say, by chance."""
    return value in graph.constants and value not in graph.weights


def _match_values_by_name(matching: NodeMatching) -> int:
    """Match values whose producer was replaced and whose name was kept."""
    count = 0
    for value, old in enumerate(matching.value_of):
        old_value = matching.old_values_by_name.get(matching.after.names[value], -1) if old < 0 else -1
        producer = matching.before.producers[old_value] if old_value >= 0 else -1
        if old_value >= 0 and (producer < 0 or matching.is_lost(producer)):
            matching.value_of[value] = old_value
            count += 1
    return count


def _match_values_by_weights(matching: NodeMatching) -> int:
    """Match input and output of a new product with those of the lost nodes that read its weights.

    A pass made such a product of several nodes: a Gemm of a MatMul and an Add, say.
    """
    count = 0
    for new in matching.open_new():
        item = matching.after.items[new]
        if item.op[1] not in PRODUCTS:
            continue
        group = find_weight_consumers(matching, item)
        count += _equate(matching, item.outputs, _outputs_of_group(matching, group))
        if all(matching.value_of[value] >= 0 for value in item.inputs if value in matching.after.weights):
            # If a weight is unknown, `group` lacks the old node that read it, and the group's inputs are not known.
            data = [value for value in item.inputs if value not in matching.after.constants]
            count += _equate(matching, data, _inputs_of_group(matching, group))
    return count


def _inputs_of_group(matching: NodeMatching, group: set[int]) -> set[int]:
    inputs = {value for old in group for value in matching.before.items[old].inputs}
    constants, producers = matching.before.constants, matching.before.producers
    return {value for value in inputs if value not in constants and producers[value] not in group}


def _outputs_of_group(matching: NodeMatching, group: set[int]) -> set[int]:
    outputs = {value for old in group for value in matching.before.items[old].outputs if value != ABSENT}
    inner = {value for value in outputs if any(consumer in group for consumer, _ in matching.before.uses[value])}
    return outputs - inner


def _equate(matching: NodeMatching, values: Sequence[int], old_values: set[int]) -> int:
    """Match the only one of `values` with the only one of `old_values`; how many were matched, 0 or 1."""
    if len(values) != 1 or len(old_values) != 1 or values[0] == ABSENT or matching.value_of[values[0]] >= 0:
        return 0
    matching.value_of[values[0]] = old_values.pop()
    return 1


def _match_duplicates_in_order(matching: NodeMatching) -> int:
    """Match nodes that compute the same and that neither a consumer nor a name distinguishes, in order."""
    count = 0
    for new in matching.open_new():
        duplicates = matching.open_duplicates(new)
        if duplicates:
            matching.claim(new, min(duplicates))
            count += 1
    return count


NAMING: Final = (
    _match_related_namesakes,
    _match_by_both_names,
    _match_values_by_name,
    _match_values_by_weights,
    _match_duplicates_in_order,
)
"""Rules for what neighbours leave open, the most certain first. They are tried in turn until a rule matches
something."""
