"""`skip: [unsafe]`: leave out the passes that an audit of the installed releases has found to do harm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Final

from passes.advisories.known import own_tables, tables_in, unsafe_names
from passes.advisories.table import Table
from passes.errors import PolicyError
from passes.versions import library_versions

__all__ = ["QUARANTINE", "check_quarantine", "is_quarantine", "quarantined", "quarantines"]

QUARANTINE: Final = "unsafe"
"""The entry of a skip list; `unsafe:FOLDER` goes by the tables in a folder, and by ours for what these do not say."""


def is_quarantine(entry: str) -> bool:
    return entry == QUARANTINE or entry.startswith(f"{QUARANTINE}:")


def quarantined(entry: str) -> frozenset[str]:
    """The full names of the passes that `entry` leaves out of this installation; empty for another entry.

    Raises:
        PolicyError, ModelError: there is no table in the folder, or one that cannot be read.
    """
    return _quarantined(entry, _stamps(_folder(entry))) if is_quarantine(entry) else frozenset()


def quarantines(skip: Iterable[str]) -> dict[str, list[str]]:
    """Entry of a skip list → the passes that it leaves out: what a result depends on, beside what the entry says."""
    return {entry: sorted(quarantined(entry)) for entry in skip if is_quarantine(entry)}


def check_quarantine(entry: str, used: Iterable[str], installed: Mapping[str, str] | None = None) -> None:
    """Refuse to go on without an audit of what is to be used.

    Args:
        used: the steps of a recipe, or passes inside of steps.
        installed: library → version; by default what is installed here.

    Raises:
        PolicyError: no table of the installed release speaks of a pass, with the releases of which some do.
    """
    tables, installed = _tables(entry), library_versions() if installed is None else installed
    for name in used:
        speaking = [one for one in tables if one.speaks_of(name) and one.distribution in installed]
        if speaking and all(installed[one.distribution] != one.version for one in speaking):
            library, known = speaking[0].distribution, ", ".join(one.version for one in speaking)
            raise PolicyError(
                f"skip: {entry} goes by audits, and of {name} there is none for {library} {installed[library]}, only "
                f"for {known}; run `onnxline audit --only {library} --out DIR`, review its table, and write "
                f"{QUARANTINE}:DIR"
            )


@lru_cache(maxsize=16)
def _quarantined(entry: str, _: tuple[object, ...]) -> frozenset[str]:
    return unsafe_names(_tables(entry), library_versions())


def _stamps(folder: str) -> tuple[object, ...]:
    """What changes when a table in the folder is replaced; a skip list is asked of each pass anew."""
    files = sorted(Path(folder).glob("*.txt")) if folder else ()
    return tuple((file.name, file.lstat().st_size, file.lstat().st_ctime_ns) for file in files)


def _folder(entry: str) -> str:
    return entry.partition(":")[2]


def _tables(entry: str) -> Sequence[Table]:
    """Those of the folder that `entry` names, and what ours say beyond them."""
    folder = _folder(entry)
    if not folder:
        return own_tables()
    found = tables_in(Path(folder))
    if not found:
        raise PolicyError(f"{entry}: no table of an audit in {folder!r}; `onnxline audit --out DIR` writes them")
    return (*found, *(_beyond(found, one) for one in own_tables()))


def _beyond(told: Sequence[Table], own: Table) -> Table:
    """Our table, without the passes of which those of the same release speak."""
    alike = [one for one in told if (one.distribution, one.version) == (own.distribution, own.version)]
    names = tuple(name for name in own.names if not any(one.speaks_of(name) for one in alike))
    return replace(own, names=names, entries=tuple(entry for entry in own.entries if entry.name in names))
