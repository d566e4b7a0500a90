"""Every model that an audit tries, by name. Only names travel to other processes: each makes the models for itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Final

from passes.audit import file_cases, node_cases
from passes.audit.case import Case
from passes.errors import PolicyError

__all__ = ["FOLDER", "case_names", "load_case"]

FOLDER: Final = "models"
"""The source of a folder of the user's own."""


def case_names(models: Path | None = None, globs: Sequence[str] = ()) -> tuple[str, ...]:
    """The names of all cases that match one of `globs`, or of all, source by source.

    Raises:
        ModelError: `models` holds no model.
        PolicyError: nothing matches.
    """
    listed = {source: names for source, (names, _) in SOURCES.items()}
    if models is not None:
        listed[FOLDER] = partial(file_cases.folder_names, models)
    asked = [source for source in listed if not globs or any(_may_match(glob, source) for glob in globs)]
    names = [f"{source}/{name}" for source in asked for name in listed[source]()]
    found = tuple(one for one in names if not globs or any(fnmatchcase(one, glob) for glob in globs))
    if not found:
        raise PolicyError(
            f"--cases: nothing matches {', '.join(globs)}; expected a glob such as node/test_if*, "
            f"with one of the sources {', '.join(listed)}"
        )
    return found


def _may_match(glob: str, source: str) -> bool:
    """To list the node tests takes seconds."""
    head, slash, _ = glob.partition("/")
    return head == source or not slash or any(letter in head for letter in "*?[")


def load_case(name: str, models: Path | None = None) -> Case:
    """
    Raises:
        ModelError: its file cannot be read.
    """
    source, _, bare = name.partition("/")
    if source == FOLDER and models is not None:
        return file_cases.load_file(FOLDER, models, bare)
    return SOURCES[source][1](bare)


SOURCES: Final[Mapping[str, tuple[Callable[[], tuple[str, ...]], Callable[[str], Case]]]] = {
    "node": (node_cases.names, node_cases.load),
    "package": (partial(file_cases.folder_names, file_cases.PACKAGE), file_cases.load_package),
    "planted": (partial(file_cases.picture_names, "planted"), partial(file_cases.load_picture, "planted")),
    "gallery": (partial(file_cases.picture_names, "gallery"), partial(file_cases.load_picture, "gallery")),
}
"""Source → its names, and how one of them is loaded."""
