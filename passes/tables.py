"""`TableResult`: what a result shows of itself by `print` and in a notebook."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from passes.visible import html_table, text_table, visible_line


class Table(NamedTuple):
    """A title, and rows of cells below `header`, which may be empty."""

    title: str
    rows: Sequence[Sequence[str]]
    header: Sequence[str] = ()


class TableResult:
    """A result that `print` shows as aligned columns and a notebook as HTML tables, without elements of weights.

    A dataclass of this base class has `repr=False`, or a `__repr__` of its own: a generated one writes out every field.
    """

    __slots__ = ()

    @abstractmethod
    def tables(self) -> Iterable[Table]:
        """What is shown; a table without rows is left out."""

    def __str__(self) -> str:
        return "".join(
            f"{visible_line(table.title)}\n{text_table([*filter(None, [table.header]), *table.rows])}"
            for table in self.tables()
            if table.rows
        )

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return "".join(html_table(*(table.title, table.header, table.rows)) for table in self.tables() if table.rows)
