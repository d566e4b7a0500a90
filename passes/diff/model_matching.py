"""Match the nodes, values, inputs and outputs of two models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from onnx import GraphProto, ValueInfoProto

from passes.graph.formatting import format_type
from passes.graph.index import required_inputs
from passes.matching.flat_graph import ABSENT, DigestTable, NodeMatching, flatten_graph, is_one_kind, share_name
from passes.matching.match import match
from passes.matching.replacements import find_replacements
from passes.model.canonical import CanonicalModel, canonicalize
from passes.proof.precision import Precisions, computed_types
from passes.weights.detached import DetachedModel


@dataclass(frozen=True)
class ModelMatching:
    """Two models, with the counterparts of their nodes and values.

    `groups` are the nodes without a counterpart, as (indices before, indices after): nodes are in one
    group with the nodes that they replace.
    """

    before: DetachedModel
    after: DetachedModel
    canonical: tuple[CanonicalModel, CanonicalModel]
    inputs: Mapping[str, str]
    """Input of the model after → the input of the model before that it is."""
    nodes: NodeMatching
    groups: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    @cached_property
    def outputs(self) -> Mapping[str, str]:
        """Output of the model after → the output of the model before that it is."""
        return same_outputs(self.before.proto.graph, self.after.proto.graph)

    @cached_property
    def old_digests(self) -> frozenset[int]:
        """The digests of all values in the model before."""
        return frozenset(self.nodes.before.value_digests)

    @cached_property
    def computed_in(self) -> tuple[Precisions, Precisions]:
        """The least precise type that each model computes a value in."""
        return computed_types(self.before), computed_types(self.after)

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Indices of the nodes that are in both, as (before, after), in the order of the second model."""
        return ((old, new) for new, old in enumerate(self.nodes.old_of) if old >= 0)

    def is_same_value(self, old: int, new: int) -> bool:
        """Whether both are one value, or differ because of added or removed nodes, which are listed themselves."""
        matching = self.nodes
        known = matching.counterpart(new)
        if matching.before.producers[old] < 0 and matching.after.producers[new] < 0:  # inputs, and what is stored
            return matching.before.value_digests[old] == matching.after.value_digests[new]
        if known >= 0:
            return known == matching.representative(old) or known in self._sources_of_lost(old)
        producer = matching.after.producers[new]
        return producer >= 0 and matching.old_of[producer] < 0

    def _sources_of_lost(self, value: int) -> set[int]:
        """The values that lost nodes computed `value` from; after their removal, consumers read one of these values."""
        matching, values, front = self.nodes, set(), [value]
        while front:
            producer = matching.before.producers[front.pop()]
            if producer >= 0 and matching.is_lost(producer):
                inputs = [
                    value
                    for value in matching.before.items[producer].inputs
                    if value != ABSENT and matching.representative(value) not in values
                ]
                values.update(map(matching.representative, inputs))
                front.extend(inputs)
        return values


def match_models(
    before: DetachedModel, after: DetachedModel, canonical: tuple[CanonicalModel, CanonicalModel] | None = None
) -> ModelMatching:
    """Match two models; `canonical` are their canonical forms, if they are known already."""
    first, second = canonical or (canonicalize(before), canonicalize(after))
    inputs = _pair_values(required_inputs(before.proto.graph), required_inputs(after.proto.graph))
    table: DigestTable = {}
    matching = match(flatten_graph(before, first, table), flatten_graph(after, second, table, inputs))
    groups = _groups(matching)
    for olds, news in groups:
        _pair(matching, olds, news)
    left = [
        (tuple(filter(matching.is_lost, olds)), tuple(new for new in news if matching.old_of[new] < 0))
        for olds, news in groups
    ]
    return ModelMatching(before, after, (first, second), inputs, matching, tuple(group for group in left if any(group)))


def _groups(matching: NodeMatching) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Group unmatched nodes: new nodes that replace some of the same old nodes share a group."""
    replacements = [(set(replacement.lost), set(replacement.news)) for replacement in find_replacements(matching)]
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
    alone = [({old}, set()) for old in matching.open_old() if old not in replaced]
    groups = [(tuple(sorted(olds)), tuple(sorted(news))) for olds, news in (*merged, *alone)]
    return sorted(groups, key=lambda group: (group[1] or group[0])[0])


def _pair(matching: NodeMatching, olds: tuple[int, ...], news: tuple[int, ...]) -> None:
    """Match a new node with the lost node of its kind that it replaces, or of its operator and name."""
    kinds: dict[tuple[str, str], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for old in filter(matching.is_lost, olds):
        kinds[matching.before.items[old].op][0].append(old)
    for new in news:
        if matching.old_of[new] < 0:
            kinds[matching.after.items[new].op][1].append(new)
    for those, these in kinds.values():
        if len(those) == len(these) == 1 and _is_one(matching, those[0], these[0]):
            matching.claim(these[0], those[0])


def _is_one(matching: NodeMatching, old: int, new: int) -> bool:
    item, old_item = matching.after.items[new], matching.before.items[old]
    return is_one_kind(matching, item, old_item) or share_name(item, old_item)


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
