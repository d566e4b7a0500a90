"""Write a table as text, sorted and without times or paths, so that it is the same on every machine; and read it."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Final

from passes.advisories.table import KINDS, AuditEntry, AuditTable, entry_of
from passes.errors import ModelError

__all__ = ["FORMAT_VERSION", "LISTED", "TITLE", "parse", "table_text", "to_one_line"]

FORMAT_VERSION: Final = 2

TITLE: Final = "onnxline audit, format "
"""How the first line of a table of any format begins."""

FIRST_LINE: Final = f"{TITLE}{FORMAT_VERSION}"

LISTED: Final = 60
"""Most cases that an entry names; with more it lists their marks, which still show a new one."""

WIDTH: Final = 118

NOTHING: Final = "."

CASE, MARKS = "  - ", "  # "
"""How a line below the head of an entry begins: indented more than the reason, which may begin with anything."""


def table_text(table: AuditTable) -> str:
    """The table, as it is written to a file: facts, counts, then each entry with its cases."""
    lines = [FIRST_LINE, f"library: {table.distribution} {table.version}"]
    lines.append("judged by: " + ", ".join(f"{name} {version}" for name, version in table.judges.items()))
    lines.append("cases: " + ", ".join(f"{source} {count}" for source, count in table.cases.items()))
    counts = table.counts()
    clean = [name for name in table.names if name not in counts]
    lines += ["", *_matrix(counts), "", f"nothing found: {len(clean)}", *_wrap(clean, "  ")]
    for title, cases in ((UNJUDGED, table.unjudged), (UNREAD, table.unread)):
        lines += ["", f"{title}{len(cases)}", *(f"  {to_one_line(case)}" for case in cases)]
    for entry in table.entries:
        lines += ["", f"[{entry.name}] {entry.kind} {entry.count}"]
        lines += [f"  {entry.why}"] if entry.why else []
        listed = 0 < len(entry.cases) <= LISTED
        lines += (
            [f"  {CASE}{to_one_line(case)}" for case in entry.cases] if listed else _wrap(entry.marks, f"  {MARKS}")
        )
    return "\n".join(lines) + "\n"


def to_one_line(case: str) -> str:
    """The name of a case in one line: as a JSON string where it holds a line break, for example."""
    return case if case.isprintable() and not case.startswith('"') else json.dumps(case)


def _wrap(words: Sequence[str], indent: str) -> list[str]:
    return textwrap.wrap(
        " ".join(words), WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _matrix(counts: dict[str, Counter[str]]) -> Iterator[str]:
    """A line for each pass with a finding, a column for each kind that occurs."""
    kinds = [kind for kind in KINDS if any(count[kind] for count in counts.values())]
    width = max(len(name) for name in ("pass", *counts))
    if kinds:
        yield _line("pass".ljust(width), kinds, kinds)
    for name in sorted(counts):
        yield _line(name.ljust(width), [str(counts[name][kind] or NOTHING) for kind in kinds], kinds)


def _line(first: str, cells: Sequence[str], kinds: Sequence[str]) -> str:
    return "  ".join([first, *(cell.rjust(len(kind)) for cell, kind in zip(cells, kinds, strict=True))]).rstrip()


def parse(text: str, place: str = "the text") -> AuditTable:
    """Read a table from its text, and check that writing the table gives the same text.

    A table that was cut off or edited by half would accept less, or call less unsafe, than it seems.

    Raises:
        ModelError: it is no table of this format, or its parts do not fit together; with the line.
    """
    lines = text.splitlines()
    if lines[:1] != [FIRST_LINE]:
        raise ModelError(
            f"{place}, line 1: {lines[:1]}, expected {FIRST_LINE!r}; write the table again with this onnxline's audit"
        )
    table = _parse_lines(lines)
    wanted = table_text(table).splitlines()
    for number, (found, expected) in enumerate(zip_longest(lines, wanted, fillvalue="the end"), 1):
        if found != expected:
            raise ModelError(
                f"{place}, line {number}: {found!r} does not fit the rest of the table, which gives {expected!r}: "
                "it was cut off, or edited by half; take tables as `onnxline audit` writes them"
            )
    return table


def _parse_lines(lines: Sequence[str]) -> AuditTable:
    """Parse all but the counts, which follow from the entries."""
    facts = dict(line.split(": ", 1) for line in lines[1:4] if ": " in line)
    library, _, version = facts.get("library", "").partition(" ")
    entries = tuple(_entries(lines))
    clean = " ".join(_lines_below(lines, "nothing found: ")).split()
    names = sorted({*clean, *(entry.name for entry in entries)})
    cases = {source: int(count) for source, count in _pairs(facts.get("cases", "")) if count.isdecimal()}
    judges = dict(_pairs(facts.get("judged by", "")))
    unjudged, unread = (tuple(map(_from_one_line, _lines_below(lines, title))) for title in (UNJUDGED, UNREAD))
    return AuditTable(library, version, tuple(names), cases, judges, unjudged, unread, entries)


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(name, value) for name, _, value in (one.partition(" ") for one in text.split(", ") if one)]


def _lines_below(lines: Sequence[str], head: str) -> list[str]:
    """The indented lines below the one that begins with `head`."""
    start = next((place for place, line in enumerate(lines) if line.startswith(head)), len(lines))
    return _first_block(lines[start + 1 :])


def _entries(lines: Sequence[str]) -> Iterator[AuditEntry]:
    for number, line in enumerate(lines):
        head = re.fullmatch(rf"\[(\S+)\] ({'|'.join(KINDS)}) \d+", line)
        if head is None:
            continue
        name, kind = head.groups()
        body = _first_block(lines[number + 1 :])
        cases = [_from_one_line(one.removeprefix(CASE)) for one in body if one.startswith(CASE)]
        marks = [mark for one in body if one.startswith(MARKS) for mark in one.removeprefix(MARKS).split()]
        why = "".join(one for one in body if not one.startswith((CASE, MARKS)))
        yield entry_of(name, kind, why, cases) if cases else AuditEntry(name, kind, why, tuple(marks))


def _from_one_line(text: str) -> str:
    try:
        return json.loads(text) if text.startswith('"') else text
    except ValueError:
        return text


def _first_block(lines: Sequence[str]) -> list[str]:
    """The indented lines that come first."""
    end = next((place for place, line in enumerate(lines) if not line.startswith("  ")), len(lines))
    return [line[2:] for line in lines[:end]]


UNJUDGED: Final = "numbers not judged: "
UNREAD: Final = "not read: "
