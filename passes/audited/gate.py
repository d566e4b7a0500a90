"""What a table has that the accepted ones do not have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from passes.audited.known import known_table
from passes.audited.table import Entry, Table, round_trips

__all__ = ["News", "news"]


@dataclass(frozen=True, slots=True)
class News:
    """Cases in which a pass does what is not accepted. `cases` is empty where only their number is known."""

    entry: Entry
    cases: tuple[str, ...]
    accepted: str
    """The table that was compared with, `onnxoptimizer 0.4.2`; empty where none speaks of the library."""


def news(tables: Iterable[Table], accepted: Sequence[Table]) -> tuple[News, ...]:
    """Compare each table with the accepted one of its release, or of the one before: that is what an upgrade changes.

    Reasons are not compared, since libraries reword what they say. Less than what is accepted is no news.
    """
    return tuple(found for table in tables for found in _of(table, known_table(accepted, table.library, table.version)))


def _of(table: Table, accepted: Table | None) -> Iterator[News]:
    named = f"{accepted.library} {accepted.version}" if accepted else ""
    for entry in table.entries:
        alike = [one for one in accepted.entries if _speaks_of(one, entry)] if accepted else []
        sources = {case.partition("/")[0] for case in entry.cases} or set(table.cases)
        may_be_within = accepted is not None and sources <= set(accepted.cases)
        if any(_covers(one, entry, may_be_within) for one in alike):
            continue
        listed = {case for one in alike for case in one.cases}
        new = tuple(case for case in entry.cases if case not in listed)
        if new or not entry.cases:
            yield News(entry, new, named)


def _speaks_of(accepted: Entry, entry: Entry) -> bool:
    """An entry of the pass itself, or of the library's round trip."""
    return accepted.kind == entry.kind and accepted.name in (entry.name, *round_trips(entry.name))


def _covers(accepted: Entry, entry: Entry, may_be_within: bool) -> bool:
    """The same cases; or fewer of the same sources, where the accepted ones are too many to be listed: then none can be
    called new."""
    return accepted.digest == entry.digest or (may_be_within and not accepted.cases and accepted.count > entry.count)
