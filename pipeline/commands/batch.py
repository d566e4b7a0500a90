"""`onnxline batch PATTERN…`: many configurations, over processes or over a Ray cluster, and one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from pipeline.commands.shared import Json
from pipeline.jobs import choose_executor
from pipeline.jobs.console import JobsConsole
from pipeline.terminal import Screen, print_json

if TYPE_CHECKING:
    from pipeline.batch import Row

FORMAT_VERSION: Final = 1
"""Version of the output of `--json`."""


def register(app: typer.Typer) -> None:
    app.command("batch")(batch)


def batch(
    patterns: Annotated[
        list[str],
        typer.Argument(
            metavar="PATTERN...", help="Configurations, or models as `run` takes them; globs may be quoted."
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder of the runs' folders, and of the table.")
    ] = Path("runs"),
    jobs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Runs at once (default: one for each two cores).")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Use this Ray cluster: HOST:PORT, or auto.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Also run what is done.")] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override one setting in each; YAML on the right."),
    ] = None,
    as_json: Json = False,
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
