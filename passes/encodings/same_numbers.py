"""Whether two tensors of two models have the same numbers, on the draws of the run; in the proof worker.

One may also be a part of the other, such as Q of a product for Q, K and V: then it fits into its range.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from onnx import numpy_helper

from passes.context import PassContext
from passes.errors import StepFailed
from passes.graph.index import GraphIndex
from passes.proof.numbers import Tolerance, compare
from passes.weights.detached import DetachedModel
from passes.weights.sharing import MappedModel, portable

Pair = tuple[str, str]
"""The name of a tensor in the first model, and in the second."""

AT_ONCE: Final = 64
"""Pairs that are compared in one run; the values of all are in memory at once."""

MOST_DRAWS: Final = 4

OTHER, PART, SAME = range(3)
"""What the numbers of one tensor are to those of another."""

TOLERANCES: Final = {"float32": Tolerance(0.0, 1e-4), "float16": Tolerance(0.0, 1e-2)}
"""As those of outputs, without the absolute part: a tensor of small numbers has small scales."""


def find_same(
    before: DetachedModel, after: DetachedModel, pairs: Sequence[Pair], context: PassContext
) -> tuple[frozenset[Pair], frozenset[Pair]]:
    """The pairs of tensors that have the same numbers on every draw, in whatever order, and those of which the second
    tensor is a part of the first; none where nothing is run."""
    draws = [dict(feeds) for feeds in context.draws()[:MOST_DRAWS]]
    if not draws or not pairs:
        return frozenset(), frozenset()
    models = [portable(model, context.spill) for model in (before, after)]

    def measure(part: Sequence[Pair]) -> Iterator[tuple[Pair, int]]:
        try:
            answers = context.proofs.ask(measure_same, before=models[0], after=models[1], pairs=part, draws=draws)
        except StepFailed:  # onnxruntime may refuse a value as an output, and says not which
            if len(part) > 1:
                yield from measure(part[: len(part) // 2])
                yield from measure(part[len(part) // 2 :])
            return
        yield from zip(part, answers, strict=True)

    starts = range(0, len(pairs), AT_ONCE)
    grades = {pair: grade for start in starts for pair, grade in measure(list(pairs[start : start + AT_ONCE]))}
    same, parts = (frozenset(pair for pair, grade in grades.items() if grade == wanted) for wanted in (SAME, PART))
    return same, parts


def measure_same(
    before: MappedModel, after: MappedModel, pairs: Sequence[Pair], draws: Sequence[Mapping[str, np.ndarray]]
) -> list[int]:
    """For each pair whether its tensors have the same numbers on all draws, or the second is a part of the first."""
    olds, news = zip(*pairs, strict=True)
    readers = _TensorReader(before, sorted(set(olds))), _TensorReader(after, sorted(set(news)))
    grades = [SAME] * len(pairs)
    for feeds in draws:
        old, new = (reader.read(feeds) for reader in readers)
        grades = [min(grade, _grade(old[one], new[other])) for grade, (one, other) in zip(grades, pairs, strict=True)]
    return grades


class _TensorReader:
    """Reads tensors of a model: inputs, stored tensors, and what nodes compute."""

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


def _grade(old: np.ndarray, new: np.ndarray) -> int:
    if old.dtype != new.dtype or not new.size or new.size > old.size:
        return OTHER
    one, other = old.reshape(-1), new.reshape(-1)
    if new.size < old.size:  # bit by bit: many numbers lie near to any other
        is_part = new.size > 1 and bool(np.isin(other, one).all())
        return PART if is_part or _is_cut(old, new) else OTHER
    if compare(one, other, TOLERANCES).ok:
        return SAME
    is_moved = old.shape != new.shape and compare(np.sort(one), np.sort(other), TOLERANCES).ok
    return SAME if is_moved else OTHER


def _is_cut(old: np.ndarray, new: np.ndarray) -> bool:
    """Whether `new` is some slices of `old` along one axis, up to rounding."""
    axes = [at for at, (size, part) in enumerate(zip(old.shape, new.shape, strict=False)) if size != part]
    if old.ndim != new.ndim or len(axes) != 1:
        return False
    rows, wanted = (np.moveaxis(one, axes[0], 0).reshape(one.shape[axes[0]], -1) for one in (old, new))
    if rows.shape[1] < LEAST_COMPARED:
        return False
    marks = rows[:, :LEAST_COMPARED]
    nearest = [int(np.abs(marks - row[:LEAST_COMPARED]).max(axis=1).argmin()) for row in wanted]
    return compare(rows[nearest], wanted, TOLERANCES).ok


LEAST_COMPARED: Final = 4
"""The fewest numbers of a slice by which it is known again."""
