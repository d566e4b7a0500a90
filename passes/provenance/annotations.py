"""What onnxline itself writes on a node or a stored tensor: who made it, of what, and who changed it since.

`Descendants` reads it: the nodes of a later model that stand where nodes of the source stood.
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
"""The pass that made the node. A node that comes from the source has none."""

REPLACED_KEY: Final = "onnxline.from"
"""The names of the source's nodes that a made node stands for: a JSON list of at most 8."""

COUNT_KEY: Final = "onnxline.from_count"
"""How many they are, where they are more than 8."""

CHANGED_KEY: Final = "onnxline.changed"
"""The passes that gave the node other attributes or other constants since: a JSON list, in order."""

SHOWN: Final = 8
"""Names of sources that are written down."""


@dataclass(frozen=True, slots=True)
class NodeAnnotations:
    """`author` is empty for a node of the source; `count` is that of the nodes of which `replaced` names the first."""

    author: str = ""
    replaced: tuple[str, ...] = ()
    count: int = 0
    changed: tuple[str, ...] = ()

    def changed_by(self, author: str) -> NodeAnnotations:
        return self if author in self.changed else replace(self, changed=(*self.changed, author))


def annotations_of(node: NodeProto | TensorProto) -> NodeAnnotations:
    """The marks of a node, or of a stored tensor, whose sources are initializers."""
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
    """Put `marks` in the place of those that `node` has."""
    lists = {REPLACED_KEY: marks.replaced, CHANGED_KEY: marks.changed}
    told = {AUTHOR_KEY: marks.author, COUNT_KEY: str(marks.count) if marks.count > len(marks.replaced) else ""}
    told |= {key: json.dumps(names, ensure_ascii=False) if names else "" for key, names in lists.items()}
    rest = [entry for entry in node.metadata_props if entry.key not in told]
    del node.metadata_props[:]
    node.metadata_props.extend(rest)
    for key, value in told.items():
        if value:
            node.metadata_props.add(key=key, value=value)


def join_annotations(author: str, replaced: Iterable[NodeProto]) -> NodeAnnotations:
    """The marks of what `author` makes of `replaced`. What an earlier pass made is named by what that stood for."""
    names: dict[str, None] = {}
    unnamed = 0
    for node in replaced:
        marks = annotations_of(node)
        names |= dict.fromkeys(marks.replaced if marks.author else [known_as(node)])
        unnamed += marks.count - len(marks.replaced)
    return NodeAnnotations(author, tuple(names)[:SHOWN], len(names) + unnamed)


def _names(written: str) -> tuple[str, ...]:
    """A list of names; empty if somebody else has written something else there."""
    try:
        names = json.loads(written)
    except ValueError:
        return ()
    return tuple(map(str, names)) if isinstance(names, list) else ()


def known_as(node: NodeProto) -> str:
    """The name by which marks speak of a node: its own, or its first output's."""
    return next((name for name in (node.name, *node.output) if name), "")


class Descendants:
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
    marks = annotations_of(node)
    return set(marks.replaced) if marks.author else {known_as(node)}
