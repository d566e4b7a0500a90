"""A table as text, sorted, without times or places, so that it is the same on every machine; and back."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from passes.audited.finding import KINDS
from passes.audited.table import Entry, Table, digest_of
from passes.errors import ModelMistake

__all__ = ["FORMAT_VERSION", "parse", "table_text"]

FORMAT_VERSION: Final = 1

FIRST_LINE: Final = f"onnxline audit, format {FORMAT_VERSION}"

WIDTH: Final = 118

NOTHING: Final = "."


def table_text(table: Table) -> str:
    """The table, as it is written to a file: facts, counts, then each entry with its cases."""
    lines = [FIRST_LINE, f"library: {table.library} {table.version}"]
    lines.append("judged by: " + ", ".join(f"{name} {version}" for name, version in table.judges.items()))
    lines.append("cases: " + ", ".join(f"{source} {count}" for source, count in table.cases.items()))
    counts = table.counts()
    clean = [name for name in table.names if name not in counts]
    lines += ["", *_matrix(counts), "", f"nothing found: {len(clean)}"]
    lines += textwrap.wrap(" ".join(clean), WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    lines += ["", f"numbers not judged: {len(table.unjudged)}", *(f"  {case}" for case in table.unjudged)]
    for entry in table.entries:
        lines += ["", f"[{entry.name}] {entry.kind} {entry.count} {entry.digest}"]
        lines += [f"  {entry.why}"] if entry.why else []
        lines += [f"  - {case}" for case in entry.cases]
    return "\n".join(lines) + "\n"


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


def parse(text: str, place: str = "the text") -> Table:
    """A table from its text. The counts are not read: they follow from the entries.

    Raises:
        ModelMistake: it is no table of this format, or an entry was edited by half; with the line.
    """
    lines = text.splitlines()
    if not lines or lines[0] != FIRST_LINE:
        raise ModelMistake(f"{place} is no table of an audit: it begins with {lines[:1]}, expected {FIRST_LINE!r}")
    facts = dict(line.split(": ", 1) for line in lines[1:4] if ": " in line)
    library, _, version = facts.get("library", "").partition(" ")
    entries = tuple(_entries(lines, place))
    clean = " ".join(_below(lines, "nothing found: ")).split()
    names = sorted({*clean, *(entry.name for entry in entries)})
    cases = {source: int(count) for source, count in _pairs(facts.get("cases", ""))}
    judges = dict(_pairs(facts.get("judged by", "")))
    return Table(library, version, tuple(names), cases, judges, tuple(_below(lines, "numbers not judged: ")), entries)


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(name, value) for name, _, value in (one.partition(" ") for one in text.split(", ") if one)]


def _below(lines: Sequence[str], head: str) -> list[str]:
    """The indented lines below the one that begins with `head`."""
    start = next((place for place, line in enumerate(lines) if line.startswith(head)), len(lines))
    return _block(lines[start + 1 :])


def _entries(lines: Sequence[str], place: str) -> Iterator[Entry]:
    for number, line in enumerate(lines):
        head = re.fullmatch(r"\[(\S+)\] (\S+) (\d+) ([0-9a-f]+)", line)
        if head is None:
            continue
        name, kind, count, digest = head.groups()
        body = _block(lines[number + 1 :])
        cases = tuple(one[2:] for one in body if one.startswith("- "))
        why = "".join(one for one in body if not one.startswith("- "))
        if kind not in KINDS or (cases and (len(cases), digest_of(cases)) != (int(count), digest)):
            raise ModelMistake(
                f"{place}, line {number + 1}: {line!r} does not fit to the {len(cases)} cases below it; "
                "take tables as `onnxline audit` writes them"
            )
        yield Entry(name, kind, why, int(count), digest, cases)


def _block(lines: Sequence[str]) -> list[str]:
    """The indented lines that come first."""
    end = next((place for place, line in enumerate(lines) if not line.startswith("  ")), len(lines))
    return [line[2:] for line in lines[:end]]
