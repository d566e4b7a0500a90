"""What onnxline itself writes on a node or a stored tensor: who made it, of what, and who changed it since."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from onnx import NodeProto, TensorProto

from passes.provenance.places import metadata_of

__all__ = [
    "AUTHOR_KEY",
    "CHANGED_KEY",
    "COUNT_KEY",
    "REPLACED_KEY",
    "SHOWN",
    "Marks",
    "joined",
    "marks_of",
    "write_marks",
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
class Marks:
    """`author` is empty for a node of the source; `count` is that of the nodes of which `replaced` names the first."""

    author: str = ""
    replaced: tuple[str, ...] = ()
    count: int = 0
    changed: tuple[str, ...] = ()

    def changed_by(self, author: str) -> Marks:
        return self if author in self.changed else replace(self, changed=(*self.changed, author))


def marks_of(node: NodeProto | TensorProto) -> Marks:
    """The marks of a node, or of a stored tensor, whose sources are initializers."""
    known = metadata_of(node)
    replaced = _names(known.get(REPLACED_KEY, "[]"))
    count = known.get(COUNT_KEY, "")
    return Marks(
        known.get(AUTHOR_KEY, ""),
        replaced,
        max(len(replaced), int(count) if count.isdecimal() else 0),
        _names(known.get(CHANGED_KEY, "[]")),
    )


def write_marks(node: NodeProto | TensorProto, marks: Marks) -> None:
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


def joined(author: str, replaced: Iterable[NodeProto]) -> Marks:
    """The marks of what `author` makes of `replaced`. What an earlier pass made is named by what that stood for."""
    names: dict[str, None] = {}
    unnamed = 0
    for node in replaced:
        marks = marks_of(node)
        own = next((name for name in (node.name, *node.output) if name), "")
        names |= dict.fromkeys(marks.replaced if marks.author else [own])
        unnamed += marks.count - len(marks.replaced)
    return Marks(author, tuple(names)[:SHOWN], len(names) + unnamed)


def _names(written: str) -> tuple[str, ...]:
    """A list of names; empty if somebody else has written something else there."""
    try:
        names = json.loads(written)
    except ValueError:
        return ()
    return tuple(map(str, names)) if isinstance(names, list) else ()
