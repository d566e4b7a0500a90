"""Find what a new node replaces: the lost nodes between its inputs and the values that its consumers read before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final

from passes.graph.op_facts import PRODUCTS
from passes.graph.traversal import walk
from passes.matching.flat_graph import ABSENT, Item, NodeMatching, is_namesake

ASKS_FOR_SHAPE: Final = frozenset({"Shape", "Size"})
"""Operators that read only a shape are off the data path, and often in another module."""


CLUMP: Final = 64
"""The largest clump of new nodes in which each node gets its own replaced nodes."""


@dataclass(frozen=True, slots=True)
class ReplacedNodes:
    """The old nodes that the new nodes `news` replace, by index: the `lost` nodes, and the nodes `around` these."""

    news: frozenset[int]
    lost: tuple[int, ...]
    """Empty where the new nodes were only inserted."""
    around: tuple[int, ...]


def find_replacements(matching: NodeMatching) -> list[ReplacedNodes]:
    """The old nodes that each unmatched new node replaces; each new node is in one entry.

    A node that replaces nothing but its namesake is matched with it: it is not new.
    """
    replacements: list[ReplacedNodes] = []
    for clump in _clumps(matching):
        # In a large clump, the replaced nodes of a single new node take long to find, and are nearly those of all.
        shares = [clump] if len(clump) > CLUMP else [{new} for new in sorted(clump)]
        for share in shares:
            together = _replaced_by(matching, share)
            products = _products_among(matching, together) if len(clump) > 1 else []
            in_products = {new for product in products for new in product.news}
            if share - in_products:
                replacements.append(replace(together, news=together.news - in_products))
            replacements.extend(products)
    news = [replacement for replacement in replacements if not _is_namesake_alone(matching, replacement)]
    return [replace(replacement, lost=tuple(filter(matching.is_lost, replacement.lost))) for replacement in news]


def _is_namesake_alone(matching: NodeMatching, replacement: ReplacedNodes) -> bool:
    if len(replacement.news) != 1 or len(replacement.lost) != 1:
        return False
    [new], [old] = replacement.news, replacement.lost
    if not matching.is_lost(old) or not is_namesake(matching, new, old):
        return False
    matching.claim(new, old)
    return True


def _clumps(matching: NodeMatching) -> list[set[int]]:
    """Clumps of new nodes: nodes that unmatched values connect are in one clump."""
    clumps: list[set[int]] = []
    seen: set[int] = set()
    for new in matching.open_new():
        if new not in seen:
            clumps.append(_through_new(matching, {new}, lambda item: _unknown_neighbours(matching, item)))
            seen |= clumps[-1]
    return clumps


def _replaced_by(matching: NodeMatching, share: set[int]) -> ReplacedNodes:
    items = matching.before.items
    entries = _entries(matching, share)
    exits = {_without_identities(matching, value) for value in _exits(matching, share)}
    ends = {equal for value in entries for equal in matching.values_equal_to(value)}
    back = _reach(exits - ends, ends, lambda value: _lost_producer(matching, value), lambda old: items[old].inputs)
    forth = _reach(ends, exits, lambda value: _lost_consumers(matching, value), lambda old: items[old].outputs)
    producers = (matching.before.producers[value] for value in entries)
    consumers = (consumer for value in exits for consumer, _ in matching.before.uses[value])
    around = {old for old in (*producers, *consumers) if old >= 0}
    return ReplacedNodes(frozenset(share), tuple(sorted(back & forth or back)), tuple(sorted(around)))


def _products_among(matching: NodeMatching, replacement: ReplacedNodes) -> list[ReplacedNodes]:
    """The new products of weights, each with the lost nodes that used only these weights.

    The other new nodes of `replacement` replace the lost nodes before and after the product: a Reshape before the new
    product replaces the Reshape before the old product.
    """
    products = []
    for new in sorted(replacement.news):
        item = matching.after.items[new]
        if item.op[1] not in PRODUCTS:
            continue
        consumers = find_weight_consumers(matching, item, among=set(replacement.lost))
        if consumers:
            lost = [old for old in replacement.lost if old in consumers or _feeds_constant(matching, old, consumers)]
            products.append(ReplacedNodes(frozenset({new}), tuple(lost), replacement.around))
    return products


def _feeds_constant(matching: NodeMatching, old: int, consumers: set[int]) -> bool:
    """Whether a node makes a constant that one of `consumers` reads, such as a transposed weight."""
    before = matching.before

    def readers(node: int) -> list[int]:
        constants = (value for value in before.items[node].outputs if value in before.constants)
        return [consumer for value in constants for consumer, _ in before.uses[value]]

    return not consumers.isdisjoint(walk(readers(old), readers))


def _without_identities(matching: NodeMatching, old_value: int) -> int:
    """The value before the lost identities that passed it on: nothing has to replace them."""
    producer = matching.before.producers[old_value]
    while producer >= 0 and matching.is_lost(producer):
        passed = matching.before.items[producer].inputs
        equals = matching.representative(old_value)  # never ABSENT
        if not passed or matching.representative(passed[0]) != equals:
            break
        old_value = passed[0]
        producer = matching.before.producers[old_value]
    return old_value


def _entries(matching: NodeMatching, share: set[int]) -> set[int]:
    """The old values that new nodes read, directly or through other new nodes."""
    indices = _through_new(matching, share, lambda item: _unknown_producers(matching, item))
    read = (value for index in indices for value in matching.after.items[index].inputs if value != ABSENT)
    return {matching.value_of[value] for value in read if matching.value_of[value] >= 0}


def _exits(matching: NodeMatching, share: set[int]) -> set[int]:
    """The old values that outputs of new nodes replace, directly or through other new nodes."""
    after = matching.after
    indices = _through_new(matching, share, lambda item: _unknown_consumers(matching, item))
    values = {value for index in indices for value in after.items[index].outputs if value != ABSENT}
    exits = {matching.value_of[value] for value in values if matching.value_of[value] >= 0}
    for consumer, position in (pair for value in values if matching.value_of[value] < 0 for pair in after.uses[value]):
        inputs = matching.before.items[matching.old_of[consumer]].inputs if matching.old_of[consumer] >= 0 else ()
        if len(inputs) == len(after.items[consumer].inputs) and inputs[position] != ABSENT:
            exits.add(inputs[position])
    return exits


def _unknown_producers(matching: NodeMatching, item: Item) -> list[int]:
    """The producers of the unknown values that a node reads."""
    unknown = (value for value in item.inputs if value != ABSENT and matching.value_of[value] < 0)
    producers = (matching.after.producers[value] for value in unknown)
    return [producer for producer in producers if producer >= 0]


def _unknown_consumers(matching: NodeMatching, item: Item) -> list[int]:
    """The consumers of the unknown values that a node makes."""
    unknown = (value for value in item.outputs if value != ABSENT and matching.value_of[value] < 0)
    return [consumer for value in unknown for consumer, _ in matching.after.uses[value]]


def _unknown_neighbours(matching: NodeMatching, item: Item) -> list[int]:
    return [*_unknown_producers(matching, item), *_unknown_consumers(matching, item)]


def _through_new(matching: NodeMatching, start: set[int], onwards: Callable[[Item], Iterable[int]]) -> set[int]:
    items, old_of = matching.after.items, matching.old_of
    return set(walk(start, lambda index: [new for new in onwards(items[index]) if old_of[new] < 0]))


def _reach(
    start: Iterable[int],
    stop: set[int],
    nodes_at: Callable[[int], Iterable[int]],
    values_at: Callable[[int], Iterable[int]],
) -> set[int]:
    """Nodes of the model before that are reached from the values `start` without passing a value in `stop`."""

    def onwards(old: int) -> list[int]:
        values = (value for value in values_at(old) if value != ABSENT and value not in stop)
        return [node for value in values for node in nodes_at(value)]

    return set(walk([node for value in start for node in nodes_at(value)], onwards))


def _lost_producer(matching: NodeMatching, value: int) -> list[int]:
    producer = matching.before.producers[value]
    return [producer] if producer >= 0 and matching.is_lost(producer) else []


def _lost_consumers(matching: NodeMatching, value: int) -> list[int]:
    """The lost consumers of a value, without those that only ask for its shape."""
    consumers = [consumer for consumer, _ in matching.before.uses[value] if matching.is_lost(consumer)]
    return [consumer for consumer in consumers if matching.before.items[consumer].op[1] not in ASKS_FOR_SHAPE]


def find_weight_consumers(matching: NodeMatching, item: Item, among: AbstractSet[int] | None = None) -> set[int]:
    """The lost nodes that read the weights of `item`, a node after the pass; empty where that is ambiguous.

    A weight that has one consumer, under all its names, is certain. Layers may share a weight, and a pass merges equal
    weights, such as biases of zeros: of several consumers, the right one is the only neighbour of the certain
    consumers. With `among`, only these nodes count.
    """
    weights = (matching.value_of[value] for value in item.inputs if value in matching.after.weights)
    consumer_sets = [_consumers_of(matching, value) for value in weights if value >= 0]
    if among is not None:
        consumer_sets = [consumers & among for consumers in consumer_sets]
    certain = {old for consumers in consumer_sets if len(consumers) == 1 for old in consumers}
    all_consumers = set(certain)
    for consumers in consumer_sets:
        near = {
            old
            for old in consumers
            if old in certain or any(_are_adjacent(matching, old, neighbour) for neighbour in certain)
        }
        if len(near) != 1:
            return set()
        all_consumers |= near
    return all_consumers if all(map(matching.is_lost, all_consumers)) else set()


def _consumers_of(matching: NodeMatching, old_value: int) -> set[int]:
    """The nodes that compute with a weight, under any of its names or through constants computed from it."""
    before = matching.before

    def readers(values: Iterable[int]) -> list[int]:
        equal = (value for known in values if known != ABSENT for value in matching.values_equal_to(known))
        return [consumer for value in equal for consumer, _ in before.uses[value]]

    def is_constant(node: int) -> bool:
        return before.constants.issuperset(before.items[node].outputs)  # ABSENT is one

    reached = walk(readers([old_value]), lambda node: readers(before.items[node].outputs) if is_constant(node) else [])
    return {node for node in reached if not is_constant(node)}


def _are_adjacent(matching: NodeMatching, old: int, other: int) -> bool:
    """Whether one of the two nodes reads an output of the other node."""
    first, second = matching.before.items[old], matching.before.items[other]
    return not set(first.outputs).isdisjoint(second.inputs) or not set(second.outputs).isdisjoint(first.inputs)
