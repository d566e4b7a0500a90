"""Where to begin to make a model smaller: around the place of the fault, which is far quicker than from the whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

from passes.graph.traversal import reads_of
from passes.model.extraction import cut, types_of
from passes.structures.view import GraphView
from passes.weights.detached import DetachedModel

__all__ = ["begin_near"]

HOPS: Final = range(2, 13)
"""How many nodes away from the place the parts to try end. Most are refused without a run, as they lack something."""


def begin_near(
    model: DetachedModel, values: Collection[str], shows: Callable[[DetachedModel], bool]
) -> DetachedModel | None:
    """A part of `model` around where `values` are made on which `shows` holds; None if that is only the whole of it."""
    types = types_of(model.proto) if values else {}
    for chosen in _around(model, values):
        if len(chosen) == len(model.proto.graph.node):
            break
        part = cut(model, [model.proto.graph.node[place] for place in sorted(chosen)], types)
        if part is not None and shows(part):
            return part
    return model if shows(model) else None


def _around(model: DetachedModel, values: Collection[str]) -> Iterator[set[int]]:
    """The places of the nodes around those that make `values`, further and further, with the constants that they read.

    No way leads through what is computed from constants alone: many parts of a model share that.
    """
    view = GraphView(model)
    nodes = list(model.proto.graph.node)
    folded = {place for place, node in enumerate(nodes) if view.folded.issuperset(node.output)}
    makers = {name: place for place, node in enumerate(nodes) for name in node.output}
    before = [{makers[name] for name in reads_of(node) if name in makers} for node in nodes]
    neighbours: dict[int, set[int]] = defaultdict(set)
    for place in set(range(len(nodes))) - folded:
        for maker in before[place] - folded:
            neighbours[place].add(maker)
            neighbours[maker].add(place)
    chosen = {makers[name] for name in values if name in makers}
    for hop in range(1, HOPS[-1] + 1 if chosen else 0):
        chosen = chosen.union(*(neighbours[place] for place in chosen))
        if hop in HOPS:
            yield _with_constants(chosen, before, folded)


def _with_constants(chosen: set[int], before: Sequence[set[int]], folded: set[int]) -> set[int]:
    whole, front = set(chosen), set(chosen)
    while front:
        front = set().union(*(before[place] & folded for place in front)) - whole
        whole |= front
    return whole
