"""Annotations that onnxline writes on a node or a stored tensor: which pass made it, of what, and later changes.

`Descendants` reads them: the nodes of a later model that replace nodes of the source.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from onnx import NodeProto, TensorProto

from passes.provenance.module_path import metadata_of

__all__ = [
    "AUTHOR_KEY",
    "CHANGED_KEY",
    "COUNT_KEY",
    "REPLACED_KEY",
    "SHOWN",
    "Descendants",
    "NodeAnnotations",
    "annotations_of",
    "join_annotations",
    "known_as",
    "write_annotations",
]


AUTHOR_KEY: Final = "onnxline.pass"
"""The pass that made the node. A node of the source has none."""

REPLACED_KEY: Final = "onnxline.from"
"""The names of the source's nodes that the node replaces: a JSON list of at most 8."""

COUNT_KEY: Final = "onnxline.from_count"
"""The number of replaced nodes, if it is more than 8."""

CHANGED_KEY: Final = "onnxline.changed"
"""The passes that gave the node other attributes or other constants since: a JSON list, in order."""

SHOWN: Final = 8
"""How many names of sources are written down."""


@dataclass(frozen=True, slots=True)
class NodeAnnotations:
    """`author` is empty for a node of the source; `replaced` names the first of the `count` replaced nodes."""

    author: str = ""
    replaced: tuple[str, ...] = ()
    count: int = 0
    changed: tuple[str, ...] = ()

    def changed_by(self, author: str) -> NodeAnnotations:
        return self if author in self.changed else replace(self, changed=(*self.changed, author))


def annotations_of(node: NodeProto | TensorProto) -> NodeAnnotations:
    """The annotations of a node, or of a stored tensor, whose sources are initializers."""
    known = metadata_of(node)
    replaced = _names(known.get(REPLACED_KEY, "[]"))
    count = known.get(COUNT_KEY, "")
    return NodeAnnotations(
        known.get(AUTHOR_KEY, ""),
        replaced,
        max(len(replaced), int(count) if count.isdecimal() else 0),
        _names(known.get(CHANGED_KEY, "[]")),
    )


def write_annotations(node: NodeProto | TensorProto, marks: NodeAnnotations) -> None:
    """Replace the annotations of `node` by `marks`."""
    lists = {REPLACED_KEY: marks.replaced, CHANGED_KEY: marks.changed}
    entries = {AUTHOR_KEY: marks.author, COUNT_KEY: str(marks.count) if marks.count > len(marks.replaced) else ""}
    entries |= {key: json.dumps(names, ensure_ascii=False) if names else "" for key, names in lists.items()}
    rest = [entry for entry in node.metadata_props if entry.key not in entries]
    del node.metadata_props[:]
    node.metadata_props.extend(rest)
    for key, value in entries.items():
        if value:
            node.metadata_props.add(key=key, value=value)


def join_annotations(author: str, replaced: Iterable[NodeProto]) -> NodeAnnotations:
    """The annotations of a node that `author` makes of `replaced`; nodes of earlier passes count as their sources."""
    names: dict[str, None] = {}
    unnamed = 0
    for node in replaced:
        marks = annotations_of(node)
        names |= dict.fromkeys(marks.replaced if marks.author else [known_as(node)])
        unnamed += marks.count - len(marks.replaced)
    return NodeAnnotations(author, tuple(names)[:SHOWN], len(names) + unnamed)


def _names(written: str) -> tuple[str, ...]:
    """A JSON list of names; empty if the text is something else."""
    try:
        names = json.loads(written)
    except ValueError:
        return ()
    return tuple(map(str, names)) if isinstance(names, list) else ()


def known_as(node: NodeProto) -> str:
    """The name of a node in annotations: its own, or its first output's."""
    return next((name for name in (node.name, *node.output) if name), "")


class Descendants:
    """The nodes of a later model, by the names of the source's nodes that they replace; annotations are read once."""

    def __init__(self, nodes: Sequence[NodeProto]) -> None:
        self._nodes = nodes
        self._places: dict[str, list[int]] = defaultdict(list)
        for place, node in enumerate(nodes):
            for name in _source_names(node):
                self._places[name].append(place)

    def of(self, sources: Iterable[NodeProto]) -> list[NodeProto]:
        """The nodes, in order, that are one of `sources` or were made of some of them, by one pass or several."""
        names = {known_as(node) for node in sources}
        return [
            self._nodes[place] for place in sorted({place for name in names for place in self._places.get(name, ())})
        ]


def _source_names(node: NodeProto) -> set[str]:
    marks = annotations_of(node)
    return set(marks.replaced) if marks.author else {known_as(node)}
