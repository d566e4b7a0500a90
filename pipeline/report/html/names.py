"""The section of `report.html` on names: old and new ones, of nodes, values and weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from passes.provenance.names import NameMap

MOST_ROWS: Final = 200
"""Rows of one table; `report.json` has all."""


@dataclass(frozen=True, slots=True)
class NameTable:
    """`rows` are pairs: the name in the source, and those in the final model; renamed ones come first."""

    title: str
    renamed: int
    gone: int
    rows: tuple[tuple[str, str], ...]

    @property
    def more(self) -> int:
        """How many names are not shown."""
        return self.renamed + self.gone - len(self.rows)


def name_tables(names: NameMap | None) -> tuple[NameTable, ...]:
    """The tables, without empty ones."""
    if names is None:
        return ()
    tables: list[NameTable] = []
    for title, changed in (("nodes", names.nodes), ("values", names.values), ("weights", names.weights)):
        rows = sorted(((old, ", ".join(news)) for old, news in changed.items()), key=lambda row: not row[1])
        gone = sum(not new for _, new in rows)
        tables.append(NameTable(title, len(rows) - gone, gone, tuple(rows[:MOST_ROWS])))
    return tuple(table for table in tables if table.rows)
