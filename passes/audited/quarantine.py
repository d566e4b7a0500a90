"""`skip: [unsafe]`: leave out the passes that an audit of the installed releases has found to do harm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from passes.audited.known import own_tables, tables_in, unsafe_names
from passes.audited.table import Table
from passes.errors import PolicyMistake
from passes.versions import library_versions

__all__ = ["QUARANTINE", "check_quarantine", "is_quarantine", "quarantined"]

QUARANTINE: Final = "unsafe"
"""The entry of a skip list; `unsafe:FOLDER` goes by the tables in a folder, and by ours for other libraries."""


def is_quarantine(entry: str) -> bool:
    return entry == QUARANTINE or entry.startswith(f"{QUARANTINE}:")


@cache
def quarantined(entry: str) -> frozenset[str]:
    """The full names of the passes that `entry` leaves out of this installation; empty for another entry."""
    return unsafe_names(_tables(entry), library_versions()) if is_quarantine(entry) else frozenset()


def check_quarantine(entry: str, names: Iterable[str], installed: Mapping[str, str] | None = None) -> None:
    """Refuse to go on without an audit of what is to be used.

    Args:
        names: every pass of a run; `STEP/PASS` says that the step is in its recipe.
        installed: library → version; by default what is installed here.

    Raises:
        PolicyMistake: no table speaks of the installed release of a library, with the releases that there are.
    """
    tables, installed = _tables(entry), library_versions() if installed is None else installed
    steps = {name.partition("/")[0] for name in names if "/" in name}
    for library in sorted({one.library for one in tables} & set(installed)):
        mine = [one for one in tables if one.library == library]
        used = library == "onnxoptimizer" or any(steps.intersection(one.names) for one in mine)
        if used and installed[library] not in {one.version for one in mine}:
            known = ", ".join(one.version for one in mine)
            raise PolicyMistake(
                f"skip: {entry} goes by audits, and there is none of {library} {installed[library]}, only of {known}; "
                f"run `onnxline audit --only {library} --out DIR`, review its table, and write {QUARANTINE}:DIR"
            )


def _tables(entry: str) -> Sequence[Table]:
    """Those of the folder that `entry` names, and ours."""
    folder = entry.partition(":")[2]
    if not folder:
        return own_tables()
    found = tables_in(Path(folder))
    if not found:
        raise PolicyMistake(
            f"skip: {entry}: no table of an audit in {folder!r}; `onnxline audit --out DIR` writes them"
        )
    told = {(one.library, one.version) for one in found}
    return (*found, *(one for one in own_tables() if (one.library, one.version) not in told))
