"""Which nodes of a later model stand where nodes of the source stood, by what the runner has written on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from onnx import NodeProto

from passes.provenance.marks import marks_of

__all__ = ["Heirs", "known_as"]


def known_as(node: NodeProto) -> str:
    """The name by which marks speak of a node: its own, or its first output's."""
    return next((name for name in (node.name, *node.output) if name), "")


class Heirs:
    """The nodes of a later model, by the names of the source's nodes that they stand for; their marks are read once."""

    def __init__(self, nodes: Sequence[NodeProto]) -> None:
        self._nodes = nodes
        self._places: dict[str, list[int]] = defaultdict(list)
        for place, node in enumerate(nodes):
            for name in _stands_for(node):
                self._places[name].append(place)

    def of(self, sources: Iterable[NodeProto]) -> list[NodeProto]:
        """The nodes, in order, that are one of `sources` or made of some of them, by whatever passes lie between."""
        names = {known_as(node) for node in sources}
        return [
            self._nodes[place] for place in sorted({place for name in names for place in self._places.get(name, ())})
        ]


def _stands_for(node: NodeProto) -> set[str]:
    marks = marks_of(node)
    return set(marks.replaced) if marks.author else {known_as(node)}
