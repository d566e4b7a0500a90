"""Which nodes and values of two models are the same, by what they compute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from passes.diff.signature import same_inputs
from passes.model.canonical import CanonicalGraph, read
from passes.provenance.match import match
from passes.provenance.replaced import replacements
from passes.provenance.same import Same, is_one_kind, name_of, result_of
from passes.provenance.wiring import Meanings, wire
from passes.weights.detached import DetachedModel

__all__ = ["Matched", "match_models"]


@dataclass(frozen=True)
class Matched:
    """Two models, and for their nodes and values the counterparts.

    `groups` are the nodes without one, as (places in the model before, places in the one after): nodes that stand in
    the place of others are in one group.
    """

    before: DetachedModel
    after: DetachedModel
    readings: tuple[CanonicalGraph, CanonicalGraph]
    inputs: Mapping[str, str]
    """Input of the model after → the input of the model before that it is."""
    same: Same
    groups: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    @cached_property
    def old_meanings(self) -> frozenset[int]:
        """What there is in the model before."""
        return frozenset(self.same.before.value_meanings)

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Places of the nodes that are in both, as (before, after), in the order of the second model."""
        return ((old, new) for new, old in enumerate(self.same.old_of) if old >= 0)


def match_models(
    before: DetachedModel, after: DetachedModel, readings: tuple[CanonicalGraph, CanonicalGraph] | None = None
) -> Matched:
    """Match two models; `readings` are theirs, if they have been read already."""
    first, second = readings or (read(before), read(after))
    inputs = same_inputs(before.proto.graph, after.proto.graph)
    meanings: Meanings = {}
    same = match(wire(before, first, meanings), wire(after, second, meanings, inputs))
    groups = _groups(same)
    for olds, news in groups:
        _pair(same, olds, news)
    left = [
        (tuple(filter(same.lost, olds)), tuple(new for new in news if same.old_of[new] < 0)) for olds, news in groups
    ]
    return Matched(before, after, (first, second), inputs, same, tuple(group for group in left if any(group)))


def _groups(same: Same) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Unmatched nodes, those together of which the new ones stand for the same old ones."""
    found = [(set(one.lost), set(one.news)) for one in replacements(same)]
    merged: list[tuple[set[int], set[int]]] = []
    for olds, news in found:
        apart = []
        for group in merged:
            if group[0].isdisjoint(olds):
                apart.append(group)
            else:
                olds, news = olds | group[0], news | group[1]
        merged = [*apart, (olds, news)]
    replaced = {old for olds, _ in merged for old in olds}
    alone = [({old}, set()) for old in same.open_old() if old not in replaced]
    groups = [(tuple(sorted(olds)), tuple(sorted(news))) for olds, news in (*merged, *alone)]
    return sorted(groups, key=lambda group: (group[1] or group[0])[0])


def _pair(same: Same, olds: tuple[int, ...], news: tuple[int, ...]) -> None:
    """A node that stands for one of its own kind, or of its own operator and name, is that one, changed."""
    kinds: dict[tuple[str, str], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for old in filter(same.lost, olds):
        kinds[same.before.items[old].op][0].append(old)
    for new in news:
        if same.old_of[new] < 0:
            kinds[same.after.items[new].op][1].append(new)
    for those, these in kinds.values():
        if len(those) == len(these) == 1 and _is_one(same, those[0], these[0]):
            same.claim(these[0], those[0])


def _is_one(same: Same, old: int, new: int) -> bool:
    item, old_item = same.after.items[new], same.before.items[old]
    names = [(handle(item), handle(old_item)) for handle in (name_of, result_of)]
    return is_one_kind(same, item, old_item) or any(one == other != "" for one, other in names)
