"""The one place that writes to the terminal. Whatever is shown passes through `passes.visible`: names come from others.

A command replaces its standard streams by `VisibleStream`, so that tracebacks, warnings, logs, and what libraries and
a user's own code print are shown in the same way. A terminal gets a `Screen`, a console of rich (`screen.py`).
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TextIO, cast

from passes.visible import json_text, open_standard_handles, visible, visible_line

if TYPE_CHECKING:
    from pipeline.terminal.screen import Screen

ASCII: Final = {"→": "->", "…": "...", "×": "x", "›": ">", "·": "*", "≤": "<=", "≥": ">=", "–": "-"}
"""Replacements for terminals whose encoding lacks these characters."""

RICH_SETTINGS: Final = ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
"""Variables of the environment by which rich takes a stream for a terminal."""

Words = str | Sequence[tuple[str, str]]
"""A line: a text that may hold names, or visible texts with the style of each."""


class PlainScreen:
    """Prints whole lines without styles, and loads no rich, which takes 0.04 of the 0.3 s of a small command.

    Args:
        stderr: write to standard error.
        quiet: write nothing.
    """

    is_terminal: Final = False
    is_jupyter: Final = False

    def __init__(self, *, stderr: bool = False, quiet: bool = False) -> None:
        self._stderr, self._quiet = stderr, quiet

    @property
    def file(self) -> IO[str]:
        stream = sys.stderr if self._stderr else sys.stdout
        return getattr(stream, "styled", stream)

    def print_line(self, text: Words, style: str = "") -> None:
        """Print one line."""
        if not self._quiet:
            line = visible_line(text) if isinstance(text, str) else "".join(part for part, _ in text)
            self.file.write(f"{visible(line)}\n")
            self.file.flush()


def open_screen(*, stderr: bool = False, quiet: bool = False) -> Screen | PlainScreen:
    """A screen with colours and lines of the terminal's width, or a plain one where the stream is no terminal."""
    plain = PlainScreen(stderr=stderr, quiet=quiet)
    if not (plain.file.isatty() or any(os.environ.get(name) for name in RICH_SETTINGS) or "IPython" in sys.modules):
        return plain
    from pipeline.terminal.screen import Screen

    return Screen(stderr=stderr, quiet=quiet)


def print_line(text: str = "", *, err: bool = False) -> None:
    """Print one line that may hold names."""
    open_screen(stderr=err).print_line(text)


def print_text(text: str, *, err: bool = False, wraps: bool = True) -> None:
    """Print lines.

    Args:
        wraps: whether a terminal may break lines between words; not in a text for programs.
    """
    screen, lines = open_screen(stderr=err), text.removesuffix("\n").split("\n") if text else []
    if wraps and screen.is_terminal:
        for line in lines:
            screen.print_line(line)
    else:
        screen.file.write("".join(f"{visible(line)}\n" for line in lines))
        screen.file.flush()


def print_json(data: Any) -> None:
    """Print JSON that reads back to `data`."""
    print_text(json_text(data), wraps=False)


class VisibleStream:
    """A text stream that shows control characters, and outlives what it writes to.

    Attributes:
        styled: the stream below, for texts with styles of our own.
    """

    def __init__(self, stream: IO[str]) -> None:
        self.styled = _LastingStream(stream)

    def write(self, text: str) -> int:
        self.styled.write(visible(text))
        return len(text)

    @property
    def loss(self) -> str:
        """Why what was printed did not arrive, such as a full disk; empty where it did, or its reader has gone."""
        self.flush()
        failure = self.styled.failure
        return "" if failure is None or failure.errno == errno.EPIPE else failure.strerror or str(failure)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.styled, name)


class _LastingStream:
    """A text stream that remembers the first failure, such as a pipe whose reader has gone, and then writes no more.

    The files of a run are worth as much when nobody reads its lines.
    """

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        self._attempt(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._attempt(self.stream.flush)

    def _attempt(self, act: Callable[..., object], *text: str) -> None:
        if self.failure is not None:
            return
        try:
            act(*text)
        except OSError as error:
            self.failure = error
            with contextlib.suppress(OSError), _open_nothing() as nothing:  # else Python writes once more at its end
                os.dup2(nothing.fileno(), self.stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def open_streams() -> Iterator[VisibleStream]:
    """Replace the standard streams of a command by ours; yields our standard output.

    Where the caller has closed a stream, nothing is written.
    """
    open_standard_handles()
    before = sys.stdout, sys.stderr
    streams = [VisibleStream(stream or _open_nothing()) for stream in before]
    for stream in streams:
        if not (stream.encoding or "utf-8").lower().startswith("utf"):  # latin-1, say, has no arrow
            codecs.register_error("onnxline", _spell_out)
            stream.reconfigure(errors="onnxline")
    sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in streams)
    try:
        yield streams[0]
    finally:
        for stream in streams:
            stream.flush()
        sys.stdout, sys.stderr = before


def _open_nothing() -> IO[str]:
    """A file that drops what is written to it."""
    return Path(os.devnull).open("w", encoding="utf-8")


def _spell_out(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(ASCII.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


@contextlib.contextmanager
def styled_streams() -> Iterator[None]:
    """For texts of our own that another library prints with its styles, such as typer's help; no name is in them."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (getattr(stream, "styled", stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
