"""What a table has that the accepted ones do not have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from passes.advisories.known import known_table
from passes.advisories.table import Entry, Table, mark_of, round_trips

__all__ = ["News", "news"]


@dataclass(frozen=True, slots=True)
class News:
    """Cases in which a pass does what is not accepted; one that the table has only the mark of is called `#MARK`."""

    entry: Entry
    cases: tuple[str, ...]
    accepted: str
    """The table that was compared with, `onnxoptimizer 0.4.2`; empty where none speaks of the library."""


def news(tables: Iterable[Table], accepted: Sequence[Table]) -> tuple[News, ...]:
    """Compare each table with the accepted one of its release, or of the one before: that is what an upgrade changes.

    Reasons are not compared, since libraries reword what they say. Less than what is accepted is no news.
    """
    return tuple(
        found for table in tables for found in _of(table, known_table(accepted, table.distribution, table.version))
    )


def _of(table: Table, accepted: Table | None) -> Iterator[News]:
    named = f"{accepted.distribution} {accepted.version}" if accepted else ""
    for entry in table.entries:
        alike = [one for one in accepted.entries if _speaks_of(one, entry)] if accepted else []
        known = {mark for one in alike for mark in one.marks}
        cases = [(mark_of(case), case) for case in entry.cases] or [(mark, f"#{mark}") for mark in entry.marks]
        new = tuple(case for mark, case in cases if mark not in known)
        if new:
            yield News(entry, new, named)


def _speaks_of(accepted: Entry, entry: Entry) -> bool:
    """An entry of the pass itself, or of the library's round trip, whose cases are told of no other pass."""
    return accepted.kind == entry.kind and accepted.name in (entry.name, *round_trips(entry.name))
