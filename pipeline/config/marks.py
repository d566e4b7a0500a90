"""Where a value of a configuration was written, kept beside the plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Document", "KeyPath", "Marks"]

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Marks:
    """Key path → `file:line`. A path without a mark takes that of the nearest key above it."""

    places: Mapping[KeyPath, str]

    @classmethod
    def none(cls, title: str) -> Marks:
        """For data that no file holds."""
        return cls({(): title})

    def place(self, path: KeyPath) -> str:
        """Where `path` was written."""
        while path not in self.places:
            if not path:
                return "configuration"
            path = path[:-1]
        return self.places[path]

    def over(self, other: Marks) -> Marks:
        """These marks, and those of `other` for what these do not have."""
        return Marks({**other.places, **self.places})

    def without(self, prefix: KeyPath) -> Marks:
        """These marks, less all that lie at or under `prefix`: for a value that was replaced as a whole."""
        return Marks({path: place for path, place in self.places.items() if path[: len(prefix)] != prefix})


@dataclass(frozen=True, slots=True)
class Document:
    """The plain data of one or more files, and where each value came from."""

    data: dict[str, Any]
    marks: Marks = field(default_factory=lambda: Marks({}))
