"""What a model says beside what it computes: types of values, names and metadata."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from onnx import ModelProto, StringStringEntryProto

__all__ = ["Annotations", "annotations_of"]

Props = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Annotations:
    """Compared as a whole. The order of nodes and types does not count; bodies of If and Loop are not looked into."""

    types: dict[str, bytes]
    """Of outputs too: what is pinned in one model is an inner value of the other."""
    nodes: Counter[tuple[str, str, tuple[str, ...], Props]]
    props: Props


def annotations_of(model: ModelProto) -> Annotations:
    graph = model.graph
    return Annotations(
        {info.name: info.type.SerializeToString(deterministic=True) for info in (*graph.output, *graph.value_info)},
        Counter((node.name, node.doc_string, tuple(node.output), _props(node.metadata_props)) for node in graph.node),
        _props((*model.metadata_props, *graph.metadata_props)),
    )


def _props(entries: Iterable[StringStringEntryProto]) -> Props:
    return tuple(sorted((entry.key, entry.value) for entry in entries))
