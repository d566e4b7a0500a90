"""`onnxline batch PATTERN…`: many configurations, over processes or over a Ray cluster, and one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from pipeline.commands.shared import add_command
from pipeline.jobs import choose_executor
from pipeline.jobs.console import JobsConsole
from pipeline.terminal import Screen, print_json

if TYPE_CHECKING:
    from pipeline.batch import Row

FORMAT_VERSION: Final = 1
"""Version of the output of `--json`."""


def register(app: typer.Typer) -> None:
    add_command(app, "batch", batch)


def batch(
    patterns: list[str],
    out: Path = Path("runs"),
    jobs: int | None = None,
    ray: str | None = None,
    again: bool = False,
    overrides: list[str] | None = None,
    as_json: bool = False,
) -> None:
    """Run many configurations at once; the same command again runs what is not done.

    The exit code is the highest of the runs'.
    """
    from pipeline.batch import WIDTH, print_batch, read_configs, run_batch  # needs torch; other commands do without

    spread = choose_executor(ray, jobs)
    planned = read_configs(patterns, overrides or ())
    with JobsConsole(sum(one.config is not None for one in planned), Screen(stderr=as_json), as_json) as screen:
        rows = run_batch(planned, out, spread, screen.show, again)
    code = max((row.exit_code for row in rows), default=0)
    if as_json:
        print_json(_as_data(rows, code))
    else:
        screen = Screen()
        print_batch(rows, screen if screen.is_terminal else Screen(width=WIDTH))
    if code:
        raise typer.Exit(code)


def _as_data(rows: Sequence[Row], code: int) -> dict[str, Any]:
    return {"format_version": FORMAT_VERSION, "exit_code": code, "runs": [dataclasses.asdict(row) for row in rows]}
