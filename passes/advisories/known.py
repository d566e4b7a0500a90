"""The accepted tables, of this release of onnxline and of a user's folder; what is news, and what `unsafe` skips."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

from passes.advisories.table import TITLE, UNSAFE, AuditEntry, AuditTable, is_round_trip, mark_of, parse, round_trips
from passes.errors import ModelError, PolicyError
from passes.recipe.recipe import library_versions

SHIPPED: Final = Path(__file__).with_name("tables")

HEAD: Final = TITLE.encode()


def file_name(library: str, version: str) -> str:
    """The name of the file with what the audit of a release has found."""
    return f"{library}-{version}.txt"


@cache
def own_tables() -> tuple[AuditTable, ...]:
    """The tables that come with onnxline."""
    return tables_in(SHIPPED)


def tables_in(folder: Path) -> tuple[AuditTable, ...]:
    """Every table in `folder`, by file name: a text file whose first line says that it is one.

    Raises:
        ModelError: one is of another format, was cut off or edited by half, or cannot be read.
    """
    contents = ((file, _content(file)) for file in sorted(folder.glob("*.txt")) if file.is_file())
    return tuple(parse(_text(content, file), str(file)) for file, content in contents if content.startswith(HEAD))


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}; expected a table of an audit") from error


def _text(content: bytes, file: Path) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ModelError(f"{file}, line {line}: not UTF-8; take tables as `onnxline audit` writes them") from error


def known_table(tables: Iterable[AuditTable], library: str, version: str) -> AuditTable | None:
    """The table of this release; else of the latest release before it; else of the first one after it."""
    of_library = sorted(
        (table for table in tables if table.distribution == library), key=lambda table: _order(table.version)
    )
    before = [table for table in of_library if _order(table.version) <= _order(version)]
    return (before[-1:] or of_library[:1] or [None])[0]


def _order(version: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in version.split("."))


def unsafe_names(tables: Sequence[AuditTable], versions: Mapping[str, str]) -> frozenset[str]:
    """The passes with a finding that is unsafe, by the tables of the versions that are installed.

    What the library does to every model is no pass's fault, and no skip list can leave it out.
    """
    installed = [table for table in tables if versions.get(table.distribution) == table.version]
    entries = (entry for table in installed for entry in table.entries if entry.kind in UNSAFE)
    return frozenset(entry.name for entry in entries if not is_round_trip(entry.name))


@dataclass(frozen=True, slots=True)
class News:
    """Cases in which a pass has an effect that is not accepted; a case known only by its mark is called `#MARK`."""

    entry: AuditEntry
    cases: tuple[str, ...]
    accepted: str
    """The table that was compared with, `onnxoptimizer 0.4.2`; empty where no table covers the library."""


def find_news(tables: Iterable[AuditTable], accepted: Sequence[AuditTable]) -> tuple[News, ...]:
    """Compare each table with the accepted table of its release, or else of the last release before it.

    The differences are what an upgrade changes. Reasons are not compared, since libraries reword their messages. Fewer
    cases than accepted are no news.
    """
    return tuple(
        found for table in tables for found in _news_of(table, known_table(accepted, table.distribution, table.version))
    )


def _news_of(table: AuditTable, accepted: AuditTable | None) -> Iterator[News]:
    named = f"{accepted.distribution} {accepted.version}" if accepted else ""
    for entry in table.entries:
        alike = [old_entry for old_entry in accepted.entries if _covers(old_entry, entry)] if accepted else []
        known = {mark for old_entry in alike for mark in old_entry.marks}
        cases = [(mark_of(case), case) for case in entry.cases] or [(mark, f"#{mark}") for mark in entry.marks]
        new = tuple(case for mark, case in cases if mark not in known)
        if new:
            yield News(entry, new, named)


def _covers(accepted: AuditEntry, entry: AuditEntry) -> bool:
    """Whether `accepted` is an entry of the same pass, or of the library's round trip, which is listed once for all."""
    return accepted.kind == entry.kind and accepted.name in (entry.name, *round_trips(entry.name))


QUARANTINE: Final = "unsafe"
"""The entry of a skip list; `unsafe:FOLDER` uses the tables in a folder, and ours for passes that they do not cover."""


def is_quarantine(entry: str) -> bool:
    """Whether an entry of a skip list is `unsafe`, or `unsafe:FOLDER`."""
    return entry == QUARANTINE or entry.startswith(f"{QUARANTINE}:")


def quarantined_passes(entry: str) -> frozenset[str]:
    """The full names of the passes that `entry` leaves out of this installation; empty for another entry.

    Raises:
        PolicyError, ModelError: there is no table in the folder, or one that cannot be read.
    """
    return _find_quarantined(entry, _stamps(_folder(entry))) if is_quarantine(entry) else frozenset()


def quarantined_by_entry(skip: Iterable[str]) -> dict[str, list[str]]:
    """Entry of a skip list → the passes that it leaves out. A result depends on them, and not only on the entry."""
    return {entry: sorted(quarantined_passes(entry)) for entry in skip if is_quarantine(entry)}


def check_quarantine(entry: str, used: Iterable[str], installed: Mapping[str, str] | None = None) -> None:
    """Refuse passes whose audits are all of other releases than the installed one.

    Args:
        entry: the entry of the skip list, `unsafe` or `unsafe:FOLDER`.
        used: the steps of a recipe, or passes inside of steps.
        installed: library → version; by default the installed libraries.

    Raises:
        PolicyError: no table of the installed release covers a pass; names the releases whose tables do.
    """
    tables, installed = _tables(entry), library_versions() if installed is None else installed
    for name in used:
        covering = [table for table in tables if table.covers(name) and table.distribution in installed]
        if covering and all(installed[table.distribution] != table.version for table in covering):
            library, known = covering[0].distribution, ", ".join(table.version for table in covering)
            raise PolicyError(
                f"skip: {entry} goes by audits, and of {name} there is none for {library} {installed[library]}, only "
                f"for {known}; run `onnxline audit --only {library} --out DIR`, review its table, and write "
                f"{QUARANTINE}:DIR"
            )


@lru_cache(maxsize=16)
def _find_quarantined(entry: str, _: tuple[object, ...]) -> frozenset[str]:
    return unsafe_names(_tables(entry), library_versions())


def _stamps(folder: str) -> tuple[object, ...]:
    """The names, sizes and times of the folder's tables: the cache key, since each pass looks the skip list up."""
    files = sorted(Path(folder).glob("*.txt")) if folder else ()
    return tuple((file.name, file.lstat().st_size, file.lstat().st_ctime_ns) for file in files)


def _folder(entry: str) -> str:
    return entry.partition(":")[2]


def _tables(entry: str) -> Sequence[AuditTable]:
    """The tables of the folder that `entry` names, and our own tables for passes that the folder's do not cover."""
    folder = _folder(entry)
    if not folder:
        return own_tables()
    listed = tables_in(Path(folder))
    if not listed:
        raise PolicyError(f"{entry}: no table of an audit in {folder!r}; `onnxline audit --out DIR` writes them")
    return (*listed, *(_without_passes_of(listed, own_table) for own_table in own_tables()))


def _without_passes_of(listed: Sequence[AuditTable], own: AuditTable) -> AuditTable:
    """Our table, without the passes that `listed` tables of the same release cover."""
    alike = [table for table in listed if (table.distribution, table.version) == (own.distribution, own.version)]
    names = tuple(name for name in own.names if not any(table.covers(name) for table in alike))
    return replace(own, names=names, entries=tuple(entry for entry in own.entries if entry.name in names))
