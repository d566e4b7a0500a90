"""The models of a run in order, and which tensors of the source a tensor of a later model may be.

Nodes are matched from version to version, as provenance matches them. The matching gives many candidates; the draws of
the run decide in the proof worker which candidates have the same values. A tensor may also be a part of another tensor,
such as Q of a product for Q, K and V: then the part fits into the range of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Final

import numpy as np
from onnx import numpy_helper

from passes.context import PassContext
from passes.errors import StepFailed
from passes.graph.index import GraphIndex
from passes.graph.op_facts import COMMUTATIVE
from passes.matching.flat_graph import ABSENT, DigestTable, FlatGraph, NodeMatching, flatten_graph
from passes.matching.match import match
from passes.matching.replacements import find_replacements
from passes.model.analysis import AnalyzedModel
from passes.proof.numbers import Tolerance, compare
from passes.weights.detached import DetachedModel
from passes.weights.sharing import MappedModel, portable


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
    gone: tensor of the source → number of the first version in which nothing stands for it (0 is the source).
    fates: tensor of the source → a sentence on what became of the node that computed it.
    """

    candidates: tuple[Candidates, ...]
    equal: Candidates
    gone: Mapping[str, int]
    fates: Mapping[str, str]


def trace_tensors(versions: Sequence[ModelVersion]) -> TracedTensors:
    """Trace the tensors of the first model through all others."""
    table: DigestTable = {}
    index = source = _index(versions[0], table)
    names = _main_values(source)
    origins: dict[str, tuple[str, ...]] = {name: (name,) for name in names}
    alive = origins  # as `origins`, of values that are equal and no mere candidates
    all_candidates, gone, fates = [origins], dict[str, int](), dict[str, str]()
    for number, version in enumerate(versions[1:], start=1):
        after = _index(version, table)
        matching = match(index, after)
        replaced = _replaced_values(matching)
        before_names, after_names = _main_values(index), _main_values(after)
        candidates_before = {
            name: [index.names[old] for old in _candidates(matching, value, before_names, replaced)]
            for name, value in after_names.items()
        }
        origins = {name: _sources_of(olds, origins) for name, olds in candidates_before.items()}
        equals_before = {name: _equal_names(matching, value, before_names) for name, value in after_names.items()}
        alive_after = {name: _sources_of(olds, alive) for name, olds in equals_before.items()}
        lost = set(chain.from_iterable(alive.values())).difference(*alive_after.values())
        fates |= _describe_fates(matching, alive, lost)
        gone |= dict.fromkeys(lost, number)
        index, alive = after, alive_after
        all_candidates.append(origins)
    return TracedTensors(tuple(all_candidates), _equal_values(source, index), gone, fates)


def _index(version: ModelVersion, table: DigestTable) -> FlatGraph:
    return flatten_graph(version.model, version.analyzed.canonical, table)


def _main_values(index: FlatGraph) -> dict[str, int]:
    """The values of the main graph by name: in the index the values of bodies come after them."""
    found: dict[str, int] = {}
    for value, name in enumerate(index.names):
        if name:
            found.setdefault(name, value)
    return found


def _sources_of(olds: Sequence[str], known: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The tensors of the source that any of `olds` may be, each once."""
    return tuple(dict.fromkeys(source for old in olds for source in known.get(old, ())))


def _candidates(
    matching: NodeMatching, value: int, before_names: Mapping[str, int], replaced: Mapping[int, Sequence[int]]
) -> list[int]:
    """The values before a step that may be the value `value` after the step."""
    before, after = matching.before, matching.after
    found = _namesake(matching, value, before_names)
    if matching.value_of[value] >= 0:
        found += matching.values_equal_to(matching.value_of[value])
    for consumer, position in after.uses[value]:
        old = matching.old_of[consumer]
        inputs = before.items[old].inputs if old >= 0 else ()
        if len(inputs) == len(after.items[consumer].inputs):
            found += inputs if after.items[consumer].op[1] in COMMUTATIVE else [inputs[position]]
    found += _values_replaced_at(matching, after.producers[value], replaced)
    return [old for old in dict.fromkeys(found) if old != ABSENT and before_names.get(before.names[old]) == old]


def _values_replaced_at(matching: NodeMatching, producer: int, replaced: Mapping[int, Sequence[int]]) -> list[int]:
    """The values that a new node replaces. A product is matched by its weight, and may have its bias in an Add or not:
    so the values of an Add after a product count before and after the step."""
    before, after = matching.before, matching.after
    if producer < 0:
        return []
    found = list(replaced.get(producer, ()))
    sums = [consumer for old in found for consumer, _ in before.uses[old] if before.items[consumer].op[1] == "Add"]
    found += [result for consumer in sums for result in before.items[consumer].outputs]
    if after.items[producer].op[1] == "Add":
        makers = [after.producers[read] for read in after.items[producer].inputs if read != ABSENT]
        found += [old for maker in makers for old in replaced.get(maker, ())]
    return found


def _namesake(matching: NodeMatching, value: int, before_names: Mapping[str, int]) -> list[int]:
    old = before_names.get(matching.after.names[value])
    return [] if old is None else [old]


def _equal_names(matching: NodeMatching, value: int, before_names: Mapping[str, int]) -> list[str]:
    """The names of the values before a step that `value`, a value after it, equals; its namesake first."""
    found = _namesake(matching, value, before_names)
    if matching.value_of[value] >= 0:
        found += matching.values_equal_to(matching.value_of[value])
    return [matching.before.names[old] for old in found]


def _replaced_values(matching: NodeMatching) -> dict[int, list[int]]:
    """New node → the outputs of the nodes that it replaces."""
    found: dict[int, list[int]] = {}
    for entry in find_replacements(matching):
        made = [value for old in reversed(entry.lost) for value in matching.before.items[old].outputs]
        found |= dict.fromkeys(entry.news, made)
    return found


def _describe_fates(
    matching: NodeMatching, alive: Mapping[str, tuple[str, ...]], lost: set[str]
) -> Iterator[tuple[str, str]]:
    """Each tensor of the source that a step has removed, and what became of its producer."""
    news: dict[int, str] = {}
    for entry in find_replacements(matching):
        made = (matching.after.items[new] for new in sorted(entry.news)[:SHOWN])
        made = " and ".join(f"{item.op[1]} {item.node.name or item.node.output[0]!r}" for item in made)
        news |= dict.fromkeys(entry.lost, f"is part of {made} now")
    for name, value in _main_values(matching.before).items():
        for source in lost.intersection(alive.get(name, ())):
            producer = matching.before.producers[value]
            if producer >= 0:
                yield source, f"its {matching.before.items[producer].op[1]} {news.get(producer, 'is gone')}"
            else:
                yield source, "nothing reads it any more"


SHOWN = 2
"""How many nodes a reason names."""


def _equal_values(source: FlatGraph, final: FlatGraph) -> dict[str, tuple[str, ...]]:
    """Tensor of the final model → the tensors of the source that have the same value; a namesake first."""
    by_digest: dict[int, list[str]] = {}
    for name, value in _main_values(source).items():
        by_digest.setdefault(source.value_digests[value], []).append(name)
    found: dict[str, tuple[str, ...]] = {}
    for name, value in _main_values(final).items():
        names = by_digest.get(final.value_digests[value], ())
        found[name] = tuple(sorted(names, key=lambda known: known != name))
    return found


Pair = tuple[str, str]
"""The name of a tensor in the first model, and in the second."""

AT_ONCE: Final = 64
"""Pairs that are compared in one run; the values of all are in memory at once."""

MOST_DRAWS: Final = 4


class Likeness(IntEnum):
    """How the values of one tensor are related to those of another tensor; on several draws, the least counts."""

    OTHER = 0
    PART = 1
    SAME = 2


TOLERANCES: Final = {"float32": Tolerance(0.0, 1e-4), "float16": Tolerance(0.0, 1e-2)}
"""The tolerances of outputs without the absolute part: a tensor of small values has small scales."""


def find_same(
    before: DetachedModel, after: DetachedModel, pairs: Sequence[Pair], context: PassContext
) -> tuple[frozenset[Pair], frozenset[Pair]]:
    """(pairs of tensors that have the same values on every draw, in any order; pairs whose second tensor is a part of
    the first). Both are empty if nothing is run."""
    draws = [dict(feeds) for feeds in context.draws()[:MOST_DRAWS]]
    if not draws or not pairs:
        return frozenset(), frozenset()
    models = [portable(model, context.spill) for model in (before, after)]

    def measure(part: Sequence[Pair]) -> Iterator[tuple[Pair, Likeness]]:
        try:
            answers = context.proofs.ask(measure_same, before=models[0], after=models[1], pairs=part, draws=draws)
        except StepFailed:  # onnxruntime may refuse a value as an output, and says not which
            if len(part) > 1:
                yield from measure(part[: len(part) // 2])
                yield from measure(part[len(part) // 2 :])
            return
        yield from zip(part, answers, strict=True)

    starts = range(0, len(pairs), AT_ONCE)
    found = [entry for start in starts for entry in measure(list(pairs[start : start + AT_ONCE]))]
    same, parts = (
        frozenset(pair for pair, likeness in found if likeness is wanted) for wanted in (Likeness.SAME, Likeness.PART)
    )
    return same, parts


def measure_same(
    before: MappedModel, after: MappedModel, pairs: Sequence[Pair], draws: Sequence[Mapping[str, np.ndarray]]
) -> list[Likeness]:
    """For each pair whether its tensors have the same values on all draws, or the second is a part of the first."""
    olds, news = zip(*pairs, strict=True)
    readers = _TensorReader(before, sorted(set(olds))), _TensorReader(after, sorted(set(news)))
    found = [Likeness.SAME] * len(pairs)
    for feeds in draws:
        old, new = (reader.read(feeds) for reader in readers)
        found = [
            min(likeness, _compare(old[first], new[second]))
            for likeness, (first, second) in zip(found, pairs, strict=True)
        ]
    return found


class _TensorReader:
    """Reads tensors of a model: inputs, stored tensors, and outputs of nodes."""

    def __init__(self, model: MappedModel, names: Sequence[str]) -> None:
        graph, weights = model.model().graph, model.map_weights()
        self._stored: dict[str, np.ndarray] = {}
        for tensor in graph.initializer:
            if tensor.name in names:
                weight = weights.get(tensor.name)
                self._stored[tensor.name] = numpy_helper.to_array(tensor) if weight is None else weight.array()
        fed = GraphIndex(graph).inputs
        self._session = model.session([name for name in names if name not in self._stored and name not in fed])

    def read(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {**feeds, **self._session.run(feeds), **self._stored}


def _compare(old: np.ndarray, new: np.ndarray) -> Likeness:
    if old.dtype != new.dtype or not new.size or new.size > old.size:
        return Likeness.OTHER
    olds, news = old.reshape(-1), new.reshape(-1)
    if new.size < old.size:  # bit by bit: many values are near to any other value
        is_part = new.size > 1 and bool(np.isin(news, olds).all())
        return Likeness.PART if is_part or _is_cut(old, new) else Likeness.OTHER
    if compare(olds, news, TOLERANCES).ok:
        return Likeness.SAME
    is_moved = old.shape != new.shape and compare(np.sort(olds), np.sort(news), TOLERANCES).ok
    return Likeness.SAME if is_moved else Likeness.OTHER


def _is_cut(old: np.ndarray, new: np.ndarray) -> bool:
    """Whether `new` is some slices of `old` along one axis, up to rounding."""
    axes = [at for at, (size, part) in enumerate(zip(old.shape, new.shape, strict=False)) if size != part]
    if old.ndim != new.ndim or len(axes) != 1:
        return False
    rows, wanted = (np.moveaxis(array, axes[0], 0).reshape(array.shape[axes[0]], -1) for array in (old, new))
    if rows.shape[1] < LEAST_COMPARED:
        return False
    marks = rows[:, :LEAST_COMPARED]
    nearest = [int(np.abs(marks - row[:LEAST_COMPARED]).max(axis=1).argmin()) for row in wanted]
    return compare(rows[nearest], wanted, TOLERANCES).ok


LEAST_COMPARED: Final = 4
"""The fewest elements by which a slice is recognized."""
