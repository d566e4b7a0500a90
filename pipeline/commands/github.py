"""`--format github`: what a check found, as annotations of a workflow and as a table in its summary."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from passes.suggest import plural
from passes.visible import visible_line
from pipeline.errors import UsageError
from pipeline.terminal import print_line

Format = Literal["text", "github"]

MOST_ANNOTATIONS: Final = 10
"""GitHub shows ten annotations of a step."""

MOST_ROWS: Final = 200
"""Rows of the table: a summary may have 1 MiB."""


def check_form(form: Format, **others: bool) -> None:
    """Refuse options that shape another form of the result.

    Args:
        form: what is asked for.
        others: option → whether it is given.

    Raises:
        UsageError: one of them is given with `github`.
    """
    given = ", ".join(f"--{name}" for name, is_given in others.items() if is_given)
    if form == "github" and given:
        raise UsageError(
            f"--format github writes annotations and a table of its own, so {given} has no effect; leave one out"
        )


def annotate(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, file: Path | None = None) -> None:
    """Print an error for each row, or a notice where there is none; and add a table to the summary of the job.

    Args:
        title: of the annotations, such as `onnxline diff`.
        header: of the columns.
        file: to which the annotations are attached, relative to the working directory.

    Raises:
        UsageError: the file of the summary cannot be written.
    """
    where = f"file={_property(str(file))}," if file is not None else ""
    shown = rows if len(rows) <= MOST_ANNOTATIONS else rows[: MOST_ANNOTATIONS - 1]
    for row in shown:
        print_line(f"::error {where}title={_property(title)}::{_data('; '.join(filter(None, row)))}")
    if len(shown) < len(rows):
        print_line(f"::error {where}title={_property(title)}::{len(rows) - len(shown)} more, in the summary")
    if not rows:
        print_line(f"::notice {where}title={_property(title)}::nothing to report")
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        try:
            with Path(summary).open("a", encoding="utf-8") as stream:
                stream.write(summary_table(title, header, rows))
        except OSError as error:
            raise UsageError(f"GITHUB_STEP_SUMMARY is {summary}, which cannot be written: {error.strerror}") from error


def summary_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, in which names stay text."""
    lines = [f"### {_cell(title)}", ""]
    if not rows:
        return "\n".join([*lines, "Nothing to report.", "", ""])
    lines += [_row(header), _row(["---"] * len(header)), *(_row([*map(_cell, row)]) for row in rows[:MOST_ROWS])]
    more = [f"and {plural(len(rows) - MOST_ROWS, 'more row')}"] if len(rows) > MOST_ROWS else []
    return "\n".join([*lines, "", *more, ""]) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    """The text without what Markdown or HTML would read."""
    shown = visible_line(text).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{letter}" if letter in "\\`*_[]|~#" else letter for letter in shown)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
