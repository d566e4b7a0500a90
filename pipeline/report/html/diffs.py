"""What a pass changed, from the diff that the run has written; cut to what a page can hold."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from passes.diff.types import Diff, NodeLabel, Replacement

__all__ = ["Entry", "PassDiff", "Section", "read_diff"]

MOST: Final = 30
"""Entries of a section that are shown."""

MOST_NODES: Final = 12
"""Nodes of one side of an entry that are shown."""

LONGEST: Final = 300
"""Characters of one text."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Either nodes that went and nodes that came, or a sentence."""

    removed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """`more` is the number of entries that are left out."""

    title: str
    entries: tuple[Entry, ...]
    more: int


@dataclass(frozen=True, slots=True)
class PassDiff:
    summary: str
    sections: tuple[Section, ...]


def read_diff(folder: Path) -> PassDiff | None:
    """The diff in `folder`; None if there is none that can be read."""
    try:
        data = json.loads((folder / "diff.json").read_text(encoding="utf-8"))
        found = TypeAdapter(Diff).validate_python({field.name: data[field.name] for field in fields(Diff)})
        return PassDiff(str(data["summary"]), tuple(_sections(found)))
    except (OSError, ValueError, LookupError, TypeError, ValidationError):
        return None


def _sections(diff: Diff) -> Iterator[Section]:
    for name, title in TITLES.items():
        entries: Sequence[object] = getattr(diff, name)
        if entries:
            yield Section(title, tuple(map(_entry, entries[:MOST])), max(0, len(entries) - MOST))


def _entry(found: object) -> Entry:
    if isinstance(found, Replacement):
        return Entry(
            _listed(found.removed), _listed((*found.added, *(f"stored constant {name}" for name in found.stored)))
        )
    return Entry(text=_short(str(found)))


def _listed(nodes: Sequence[NodeLabel | str]) -> tuple[str, ...]:
    told = [_short(str(node)) for node in nodes[:MOST_NODES]]
    return (*told, f"{len(nodes) - MOST_NODES} more") if len(nodes) > MOST_NODES else tuple(told)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


TITLES: Final = {
    "header": "model",
    "replaced": "nodes",
    "attributes": "attributes",
    "rewired": "inputs of nodes",
    "initializers": "weights and constants",
    "shared": "which of equal values is read",
}
"""Field of `Diff` → title of its section."""
