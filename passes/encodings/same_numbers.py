"""Whether two tensors of two models have the same numbers, on the draws of the run; in the proof worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from onnx import numpy_helper

from passes.context import PassContext
from passes.errors import StepFailed
from passes.proof.numbers import Tolerance, compare
from passes.weights.detached import DetachedModel
from passes.weights.sharing import MappedModel, portable

__all__ = ["Pair", "find_same", "measure_same"]

Pair = tuple[str, str]
"""The name of a tensor in the first model, and in the second."""

AT_ONCE: Final = 64
"""Pairs that are compared in one run; the values of all are in memory at once."""

MOST_DRAWS: Final = 4

TOLERANCES: Final = {"float32": Tolerance(0.0, 1e-4), "float16": Tolerance(0.0, 1e-2)}
"""As those of outputs, without the absolute part: a tensor of small numbers has small scales."""


def find_same(
    before: DetachedModel, after: DetachedModel, pairs: Sequence[Pair], context: PassContext
) -> frozenset[Pair]:
    """The pairs of tensors that have the same numbers on every draw, in whatever order; none where nothing is run."""
    draws = [dict(feeds) for feeds in context.draws()[:MOST_DRAWS]]
    if not draws or not pairs:
        return frozenset()
    models = [portable(model, context.spill) for model in (before, after)]

    def measure(part: Sequence[Pair]) -> Iterator[Pair]:
        try:
            answers = context.proofs.ask(measure_same, before=models[0], after=models[1], pairs=part, draws=draws)
        except StepFailed:  # onnxruntime may refuse a value as an output, and says not which
            if len(part) > 1:
                yield from measure(part[: len(part) // 2])
                yield from measure(part[len(part) // 2 :])
            return
        yield from (pair for pair, is_same in zip(part, answers, strict=True) if is_same)

    starts = range(0, len(pairs), AT_ONCE)
    return frozenset(pair for start in starts for pair in measure(list(pairs[start : start + AT_ONCE])))


def measure_same(
    before: MappedModel, after: MappedModel, pairs: Sequence[Pair], draws: Sequence[Mapping[str, np.ndarray]]
) -> list[bool]:
    """For each pair whether its tensors have the same numbers on all draws."""
    olds, news = zip(*pairs, strict=True)
    readers = _TensorReader(before, sorted(set(olds))), _TensorReader(after, sorted(set(news)))
    verdicts = [True] * len(pairs)
    for feeds in draws:
        old, new = (reader.read(feeds) for reader in readers)
        verdicts = [
            verdict and _has_same_numbers(old[one], new[other])
            for verdict, (one, other) in zip(verdicts, pairs, strict=True)
        ]
    return verdicts


class _TensorReader:
    """Reads tensors of a model: inputs, stored tensors, and what nodes compute."""

    def __init__(self, model: MappedModel, names: Sequence[str]) -> None:
        graph, weights = model.model().graph, model.map_weights()
        self._stored: dict[str, np.ndarray] = {}
        for tensor in graph.initializer:
            if tensor.name in names:
                weight = weights.get(tensor.name)
                self._stored[tensor.name] = numpy_helper.to_array(tensor) if weight is None else weight.array()
        fed = {info.name for info in graph.input}
        self._session = model.session([name for name in names if name not in self._stored and name not in fed])

    def read(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {**feeds, **self._session.run(feeds), **self._stored}


def _has_same_numbers(old: np.ndarray, new: np.ndarray) -> bool:
    if old.size != new.size or old.dtype != new.dtype or not old.size:
        return False
    one, other = old.reshape(-1), new.reshape(-1)
    if compare(one, other, TOLERANCES).ok:
        return True
    return bool(old.shape != new.shape) and compare(np.sort(one), np.sort(other), TOLERANCES).ok
