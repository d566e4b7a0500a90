"""Which nodes of a later model stand where nodes of the source stood, by what the runner has written on them."""

from __future__ import annotations

from collections.abc import Iterable

from onnx import NodeProto

from passes.provenance.marks import marks_of

__all__ = ["heirs_of", "known_as"]


def known_as(node: NodeProto) -> str:
    """The name by which marks speak of a node: its own, or its first output's."""
    return next((name for name in (node.name, *node.output) if name), "")


def heirs_of(sources: Iterable[NodeProto], nodes: Iterable[NodeProto]) -> list[NodeProto]:
    """Those of `nodes` that are one of `sources` or were made of some of them, by whatever passes lie between."""
    names = {known_as(node) for node in sources}
    return [node for node in nodes if _stands_for(node) & names]


def _stands_for(node: NodeProto) -> set[str]:
    marks = marks_of(node)
    return set(marks.replaced) if marks.author else {known_as(node)}
