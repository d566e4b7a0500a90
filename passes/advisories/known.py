"""The tables that are accepted: those of this release of onnxline, for the libraries that it was built with, and a
folder of the user's own."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from passes.advisories.finding import UNSAFE
from passes.advisories.table import Table, is_round_trip
from passes.advisories.text import TITLE, parse
from passes.errors import ModelError

__all__ = ["SHIPPED", "file_name", "known_table", "own_tables", "tables_in", "unsafe_names"]

SHIPPED: Final = Path(__file__).with_name("tables")

HEAD: Final = TITLE.encode()


def file_name(library: str, version: str) -> str:
    return f"{library}-{version}.txt"


@cache
def own_tables() -> tuple[Table, ...]:
    """The tables that come with onnxline."""
    return tables_in(SHIPPED)


def tables_in(folder: Path) -> tuple[Table, ...]:
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


def known_table(tables: Iterable[Table], library: str, version: str) -> Table | None:
    """The table of this very release, or else that of the latest one before it, or else the first after it."""
    found = sorted((one for one in tables if one.distribution == library), key=lambda one: _order(one.version))
    before = [one for one in found if _order(one.version) <= _order(version)]
    return (before[-1:] or found[:1] or [None])[0]


def _order(version: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in version.split("."))


def unsafe_names(tables: Sequence[Table], versions: Mapping[str, str]) -> frozenset[str]:
    """The passes with a finding that is unsafe, by the tables of the versions that are installed.

    What the library does to every model is no pass's fault, and no skip list can leave it out.
    """
    installed = [one for one in tables if versions.get(one.distribution) == one.version]
    entries = (entry for one in installed for entry in one.entries if entry.kind in UNSAFE)
    return frozenset(entry.name for entry in entries if not is_round_trip(entry.name))
