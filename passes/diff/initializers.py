"""Which stored tensors two models have otherwise."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from onnx import GraphProto, TensorProto

from passes.diff.found import InitializerChange
from passes.diff.matched import Matched
from passes.provenance.wiring import Wiring
from passes.spelled import spelled_shape

__all__ = ["Stored", "initializer_changes"]

Stored = tuple[int, int]
"""The ids, before and after, of a tensor that two matched nodes read at the same place, and whose values differ."""


def initializer_changes(matched: Matched, changed: Sequence[Stored]) -> Iterator[InitializerChange]:
    """What is changed, with how far; what came, and what went. Copies count, names do not."""
    before, after = matched.same.before, matched.same.after
    olds, news = _tensors(matched.before.proto.graph), _tensors(matched.after.proto.graph)
    pairs = {(before.names[old], after.names[new]) for old, new in changed}
    gone, come = _surplus(before, after, olds), _surplus(after, before, news)
    pairs |= {(name, name) for name in (*gone, *come) if name in gone and name in come}
    for old_name, name in sorted(pairs):
        if old_name in olds and name in news:
            old, new = olds[old_name], news[name]
            what = _distance(matched.before.array(old), matched.after.array(new))
            yield InitializerChange(name, spelled_shape(old), spelled_shape(new), what)
    for name in gone:
        if name not in {one for one, _ in pairs}:
            yield InitializerChange(name, spelled_shape(olds[name]), "")
    for name in come:
        if name not in {one for _, one in pairs}:
            yield InitializerChange(name, "", spelled_shape(news[name]))


def _tensors(graph: GraphProto) -> dict[str, TensorProto]:
    """The initializers of `graph` and of the graphs inside of it."""
    found = {}
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                found.update(_tensors(inner))
    return {**found, **{tensor.name: tensor for tensor in graph.initializer}}


def _surplus(one: Wiring, other: Wiring, tensors: dict[str, TensorProto]) -> list[str]:
    """The initializers of `one` that `other` has not, or has fewer copies of."""
    mine, others = _by_meaning(one), _by_meaning(other)
    found = []
    for meaning, names in mine.items():
        there = set(others[meaning])
        # Of copies those are surplus that have no namesake.
        ordered = sorted(names, key=lambda name: name not in there)
        found.extend(name for name in ordered[len(others[meaning]) :] if name in tensors)
    return found


def _by_meaning(wiring: Wiring) -> dict[int, list[str]]:
    found: dict[int, list[str]] = defaultdict(list)
    for value in wiring.shapes:
        if wiring.makers[value] < 0:
            found[wiring.value_meanings[value]].append(wiring.names[value])
    return found


def _distance(before: np.ndarray, after: np.ndarray) -> str:
    if before.shape != after.shape or before.dtype != after.dtype:
        return ""
    other = before != after
    if before.dtype.kind in "fc" or "float" in str(before.dtype):
        other &= ~((before != before) & (after != after))  # NaN in both
        with np.errstate(all="ignore"):
            furthest = np.abs(after.astype(np.float64) - before.astype(np.float64))[other]
        furthest = furthest[np.isfinite(furthest)]
        far = f", by up to {furthest.max():.3g}" if furthest.size else ""
    else:
        far = ""
    return f"{int(other.sum())} of {other.size} values differ{far}"
