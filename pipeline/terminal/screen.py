"""What a terminal is drawn on: consoles and bars of rich, which show names as everything else shows them.

A `Screen` replaces characters in names itself, and writes its own styles past `VisibleStream`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, Final, TextIO, cast

from rich.console import Console
from rich.progress import Progress
from rich.segment import Segment
from rich.text import Text

from passes.visible import visible, visible_line
from pipeline.terminal import VisibleStream, Words

if TYPE_CHECKING:
    from rich.console import ConsoleOptions, RenderableType

INDENT: Final = 2
"""Columns by which what goes on from the line above is indented."""


class Screen(Console):
    """A console of rich that shows names as they stand: no markup, no highlighting, no control characters.

    Args:
        stderr: write to standard error.
        settings: other settings of rich's console.
    """

    def __init__(self, *, stderr: bool = False, **settings: Any) -> None:
        super().__init__(stderr=stderr, markup=False, highlight=False, emoji=False, **settings)

    @property
    def file(self) -> IO[str]:  # pyright: ignore[reportIncompatibleMethodOverride] - nobody sets it
        stream = super().file
        return getattr(stream, "styled", stream)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)

    def print_line(self, text: Words, style: str = "") -> None:
        """Print one line. A terminal gets it in lines that end between words; elsewhere it stays whole."""
        line = Text(visible_line(text), style) if isinstance(text, str) else Text.assemble(*text)
        if self.is_terminal:
            line = _wrap(self, line)
        self.print(line, soft_wrap=True)


def _wrap(console: Console, line: Text) -> Text:
    """`line` in lines of the terminal's width; a word that is longer, such as a path, is never cut."""
    if line.cell_len <= console.width:
        return line
    line.overflow = "ignore"
    margin = len(line.plain) - len(line.plain.lstrip()) + INDENT
    lines = line.wrap(console, max(console.width - margin, 1))
    for part in lines:
        part.rstrip()
    first, *rest = lines
    return Text("\n").join([first, *(Text(" " * margin).append_text(more) for more in rest)])


class ProgressBar(Progress):
    """A progress bar above which what others print is shown as everything else is."""

    def start(self) -> None:
        super().start()
        if self.live.is_started and not self.disable:  # rich reads styles and links out of what is printed meanwhile
            sys.stdout, sys.stderr = (cast(TextIO, VisibleStream(stream)) for stream in (sys.stdout, sys.stderr))
