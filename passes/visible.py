r"""Show the characters that command a terminal, or reorder text, as escapes: `\x1b`, `\u202e`.

Names come from models, files and configurations that somebody else may have made. A name can hold the sequence that
sets a terminal's title, clears it or opens a link, or a mark that shows the text after it backwards.
"""

from __future__ import annotations

import json
import os
import re
import sys
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final, NamedTuple

HIDDEN: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 but for tab and newline, DEL, C1, the marks of bidirectional text, separators of lines, and lone surrogates."""


def open_standard_handles() -> None:
    """Open /dev/null in place of each standard stream that the caller has closed.

    Otherwise the next file or pipe that is opened gets its number, and what is printed goes into it.
    """
    for handle in range(3):
        try:
            os.fstat(handle)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def visible(text: str) -> str:
    """Replace each character of `HIDDEN` by its escape. Lines stay lines."""
    return HIDDEN.sub(_escape, text)


def visible_line(text: str) -> str:
    """`visible` for one line: a newline in a name is shown as an escape too, and begins no line of its own."""
    return visible(text).replace("\n", "\\n")


def visible_markup(text: str) -> str:
    """`visible_line` for a text in HTML or SVG: XML has no characters that command a terminal."""
    return escape(visible_line(text))


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines of aligned columns, two spaces in."""
    return "".join(f"  {line}\n" for line in table_lines(rows))


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, in aligned columns."""
    shown = [[visible_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[at]) for row in shown if at < len(row)) for at in range(max(map(len, shown), default=0))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)).rstrip() for row in shown]


def html_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a notebook or a page; every text is escaped."""

    def line(cells: Sequence[str], tag: str) -> str:
        return (
            "<tr>"
            + "".join(f"<{tag} style='text-align:left'>{visible_markup(cell)}</{tag}>" for cell in cells)
            + "</tr>"
        )

    head = f"<thead>{line(header, 'th')}</thead>" if header else ""
    body = "".join(line(row, "td") for row in rows)
    caption = f"<caption style='text-align:left'>{visible_markup(title)}</caption>"
    return f"<table>{caption}{head}<tbody>{body}</tbody></table>\n"


def visible_data(data: Any) -> Any:
    """Plain data in which each string, keys included, is `visible`."""
    match data:
        case str():
            return visible(data)
        case Mapping():
            return {visible_data(key): visible_data(value) for key, value in data.items()}
        case list() | tuple():
            return [visible_data(item) for item in data]
    return data


def json_text(data: Any, indent: int | None = 2, **settings: Any) -> str:
    r"""JSON that reads back to `data`, with each character of `HIDDEN` as JSON escapes it: `\u001b`."""
    return visible_json(json.dumps(data, indent=indent, ensure_ascii=False, **settings))


def visible_json(text: str) -> str:
    """The JSON in `text`, with each character of `HIDDEN` as JSON escapes it; it reads back to the same data."""
    return HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def write_to_stderr(*lines: str) -> None:
    """Write lines as a whole, which a text stream does not promise when threads write at once. A script that has
    closed standard error gets nothing."""
    text = "".join(f"{visible_line(line)}\n" for line in lines)
    try:
        if hasattr(sys.stderr, "buffer"):
            sys.stderr.flush()
            sys.stderr.buffer.write(text.encode(errors="backslashreplace"))
        else:
            sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass


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
