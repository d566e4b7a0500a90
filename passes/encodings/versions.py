"""The models of a run in order, and which tensors of the source a tensor of a later model may be.

Nodes are matched from version to version, as provenance matches them. That gives candidates, generously: whether one of
them has the same numbers is not decided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from passes.graph.op_facts import COMMUTATIVE
from passes.matching.flat_graph import ABSENT, FlatGraph, NodeMeanings, flatten_graph
from passes.matching.match import match
from passes.matching.node_matching import NodeMatching
from passes.matching.replacements import find_replacements
from passes.model.analysis import AnalyzedModel
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """A model of a run; `author` is the step that made it, empty for the source."""

    author: str
    analyzed: AnalyzedModel

    @property
    def model(self) -> DetachedModel:
        return self.analyzed.model


Candidates = Mapping[str, tuple[str, ...]]
"""Tensor of a later model → tensors of the source that it may be, the likeliest first."""


@dataclass(frozen=True, slots=True)
class TracedTensors:
    """What is known of the tensors of the source in each version.

    candidates: of each version.
    equal: tensor of the final model → the tensors of the source that are computed in the same way.
    gone: tensor of the source → place of the first version in which nothing takes its place any more.
    fates: tensor of the source → a sentence on what became of the node that computed it.
    """

    candidates: tuple[Candidates, ...]
    equal: Candidates
    gone: Mapping[str, int]
    fates: Mapping[str, str]


def trace_tensors(versions: Sequence[ModelVersion]) -> TracedTensors:
    """Trace the tensors of the first model through all others."""
    meanings: NodeMeanings = {}
    index = source = _index(versions[0], meanings)
    names = _main_values(source)
    origins: dict[str, tuple[str, ...]] = {name: (name,) for name in names}
    alive = origins
    all_candidates, gone, fates = [origins], dict[str, int](), dict[str, str]()
    for place, version in enumerate(versions[1:], start=1):
        after = _index(version, meanings)
        same = match(index, after)
        replaced = _replaced_values(same)
        before_names, after_names = _main_values(index), _main_values(after)
        step = {
            name: [index.names[old] for old in _candidates(same, value, before_names, replaced)]
            for name, value in after_names.items()
        }
        origins = {name: _sources_of(olds, origins) for name, olds in step.items()}
        was_alive = {source_name for known in alive.values() for source_name in known}
        kept = {name: _kept_names(same, value, before_names) for name, value in after_names.items()}
        still = {name: _sources_of(olds, alive) for name, olds in kept.items()}
        is_alive = {source_name for known in still.values() for source_name in known}
        fates |= _describe_fates(same, alive, was_alive - is_alive)
        gone |= dict.fromkeys(was_alive - is_alive, place)
        index, alive = after, still
        all_candidates.append(origins)
    return TracedTensors(tuple(all_candidates), _equal_values(source, index), gone, fates)


def _index(version: ModelVersion, meanings: NodeMeanings) -> FlatGraph:
    return flatten_graph(version.model, version.analyzed.reading, meanings)


def _main_values(index: FlatGraph) -> dict[str, int]:
    """The values of the main graph by name: those of bodies come behind them in the index."""
    found: dict[str, int] = {}
    for value, name in enumerate(index.names):
        if name:
            found.setdefault(name, value)
    return found


def _sources_of(olds: Sequence[str], known: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The tensors of the source that any of `olds` may be, each once."""
    return tuple(dict.fromkeys(source for old in olds for source in known.get(old, ())))


def _candidates(
    same: NodeMatching, value: int, before_names: Mapping[str, int], replaced: Mapping[int, Sequence[int]]
) -> list[int]:
    """The values before a step that one after it may be."""
    before, after = same.before, same.after
    found = _namesake(same, value, before_names)
    if same.value_of[value] >= 0:
        found += same.values_equal_to(same.value_of[value])
    for user, position in after.users[value]:
        old = same.old_of[user]
        needs = before.items[old].needs if old >= 0 else ()
        if len(needs) == len(after.items[user].needs):
            found += needs if after.items[user].op[1] in COMMUTATIVE else [needs[position]]
    maker = after.makers[value]
    found += replaced.get(maker, ()) if maker >= 0 else ()
    return [old for old in dict.fromkeys(found) if old != ABSENT and before_names.get(before.names[old]) == old]


def _namesake(same: NodeMatching, value: int, before_names: Mapping[str, int]) -> list[int]:
    old = before_names.get(same.after.names[value])
    return [] if old is None else [old]


def _kept_names(same: NodeMatching, value: int, before_names: Mapping[str, int]) -> list[str]:
    """The values before a step of which one after it has the name, or the place."""
    found = _namesake(same, value, before_names)
    if same.value_of[value] >= 0:
        found += same.values_equal_to(same.value_of[value])
    return [same.before.names[old] for old in found]


def _replaced_values(same: NodeMatching) -> dict[int, list[int]]:
    """New node → what the nodes made that it replaces."""
    found: dict[int, list[int]] = {}
    for entry in find_replacements(same):
        made = [value for old in reversed(entry.lost) for value in same.before.items[old].makes]
        found |= dict.fromkeys(entry.news, made)
    return found


def _describe_fates(
    same: NodeMatching, alive: Mapping[str, tuple[str, ...]], lost: set[str]
) -> Iterator[tuple[str, str]]:
    """Tensor of the source that a step has removed → what became of the node that made it."""
    news: dict[int, str] = {}
    for entry in find_replacements(same):
        made = " and ".join(
            f"{same.after.items[new].op[1]} {same.after.items[new].node.name or same.after.items[new].node.output[0]!r}"
            for new in sorted(entry.news)[:SHOWN]
        )
        news |= dict.fromkeys(entry.lost, f"is part of {made} now")
    for name, value in _main_values(same.before).items():
        for source in lost.intersection(alive.get(name, ())):
            maker = same.before.makers[value]
            if maker >= 0:
                yield source, f"its {same.before.items[maker].op[1]} {news.get(maker, 'is gone')}"
            else:
                yield source, "nothing reads it any more"


SHOWN = 2
"""How many nodes a reason names."""


def _equal_values(source: FlatGraph, final: FlatGraph) -> dict[str, tuple[str, ...]]:
    """Tensor of the final model → the tensors of the source of the same meaning; a namesake first."""
    by_meaning: dict[int, list[str]] = {}
    for name, value in _main_values(source).items():
        by_meaning.setdefault(source.value_meanings[value], []).append(name)
    found: dict[str, tuple[str, ...]] = {}
    for name, value in _main_values(final).items():
        names = by_meaning.get(final.value_meanings[value], ())
        found[name] = tuple(sorted(names, key=lambda one: one != name))
    return found
