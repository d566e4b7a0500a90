"""Which values of two models may be one value, by the nodes that make them and by the nodes that read them."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Final

from passes.diff.model_matching import ModelMatching, same_outputs
from passes.graph.op_facts import COMMUTATIVE
from passes.matching.graph_index import ABSENT, Item
from passes.matching.node_matching import NodeMatching


@dataclass(frozen=True, slots=True)
class ValuePairs:
    """Pairs of value ids in the indices of two models; of equal values of the first model, the representative.

    A matched node is one node in both models, but what it makes may be another value: a Conv that took in a
    BatchNormalization makes what the BatchNormalization made.
    """

    read_as: Mapping[int, Set[int]]
    """Value of the second model → the values of the first in whose place matched nodes read it."""
    certain: Mapping[int, Set[int]]
    """The part of `read_as` from which both models compute an output by the same nodes with the same weights."""
    news: Mapping[int, Iterable[int]]
    """Value of the first model → the values of the second that may be it, by what makes them first."""


def pair_values(matched: ModelMatching) -> ValuePairs:
    """Pair the values of two models, from the outputs up."""
    same = matched.same
    before, after = same.before, same.after
    read_as: dict[int, set[int]] = defaultdict(set)
    for name, old_name in same_outputs(matched.before.proto.graph, matched.after.proto.graph).items():
        read_as[after.outputs[name]].add(same.representative(before.outputs[old_name]))
    certain = defaultdict(set, {new: set(olds) for new, olds in read_as.items()})
    for place in reversed(range(len(after.items))):
        item, old_place = after.items[place], same.old_of[place]
        if old_place < 0:
            if item.op[1] in QUANTIZING:  # its results stand for its input
                for known in (read_as, certain):
                    known[item.needs[0]] |= known[item.makes[0]]
            continue
        old_item = before.items[old_place]
        made = [pair for pair in zip(item.makes, old_item.makes, strict=False) if ABSENT not in pair]
        is_certain = any(same.representative(old) in certain[new] for new, old in made)
        is_certain = is_certain and item.settings == old_item.settings and _read_same_constants(same, item, old_item)
        for new, old in _read_in_same_place(same, item, old_item):
            read_as[new].add(old)
            if is_certain:
                certain[new].add(old)
    news: dict[int, dict[int, None]] = defaultdict(dict)
    for new, old in enumerate(same.value_of):
        for one in (old, *sorted(read_as[new])):
            if one >= 0:
                news[same.representative(one)][new] = None
    return ValuePairs(dict(read_as), dict(certain), dict(news))


QUANTIZING: Final = frozenset({"QuantizeLinear", "DequantizeLinear"})


def _read_in_same_place(same: NodeMatching, item: Item, old_item: Item) -> Iterator[tuple[int, int]]:
    """The values but constants that two matched nodes read in the same place.

    Operands of a commutative op that are not known stand for all that are not known: their numbers tell them apart.
    """
    news, olds = ([need for need in one.needs if need != ABSENT] for one in (item, old_item))
    pairs = list(zip(news, map(same.representative, olds), strict=False)) if len(news) == len(olds) else []
    if item.op[1] in COMMUTATIVE:
        both = list(itertools.product(news, map(same.representative, olds)))
        known = [(new, old) for new, old in both if same.counterpart(new) == old]
        seen, old_seen = {new for new, _ in known}, {old for _, old in known}
        pairs = [*known, *((new, old) for new, old in both if new not in seen and old not in old_seen)]
    constants = same.after.constants, same.before.constants
    return ((new, old) for new, old in pairs if new not in constants[0] and old not in constants[1])


def _read_same_constants(same: NodeMatching, item: Item, old_item: Item) -> bool:
    """Whether two nodes read the same constants, but for weights that were quantized."""
    before, after = same.before, same.after
    olds = Counter(
        before.value_meanings[need] for need in old_item.needs if need != ABSENT and need in before.constants
    )
    news = [need for need in item.needs if need != ABSENT and need in after.constants]
    others = [need for need in news if after.value_meanings[need] not in olds]
    makers = [after.makers[need] for need in others]
    are_quantized = all(place >= 0 and after.items[place].op[1] in QUANTIZING for place in makers)
    return len(news) == olds.total() and are_quantized
