"""`onnxline diff A.onnx B.onnx`: what the second model has otherwise, by structure and by numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from passes.bench import limit_runs, open_bench
from passes.diff import (
    Diff,
    Numbers,
    compare_matched,
    compare_numbers,
    diff_as_data,
    diff_text,
    match_models,
    numbers_as_data,
    numbers_text,
)
from passes.errors import PassError
from passes.model.weights import read_model
from passes.optimize import draw_feeds
from passes.why import file_of

__all__ = ["FORMAT_VERSION", "register"]

FORMAT_VERSION: Final = 1
"""Of what `--json` writes."""

DIFFERENT: Final = 1
"""Exit code when there is a difference."""


def register(app: typer.Typer) -> None:
    app.command("diff")(diff)


def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="An ONNX file, or the folder of a run.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="What is compared with it.")],
    values: Annotated[bool, typer.Option("--values", help="Compare the values between the nodes too.")] = False,
    structure_only: Annotated[bool, typer.Option("--structure-only", help="Do not run the models.")] = False,
    names: Annotated[bool, typer.Option("--names", help="Tell what was only renamed.")] = False,
    most: Annotated[int, typer.Option(min=1, help="Entries of one kind to write out.")] = 20,
    draws: Annotated[int, typer.Option(min=1, help="Seeded inputs on which the models run.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, for programs, with every entry.")] = False,
) -> None:
    """Say what B has otherwise than A; the exit code is 1 if there is a difference.

    Nodes are matched by what they compute: other names and another order of independent nodes are no difference.
    """
    first, second = (read_model(file_of(path)) for path in (before, after))
    matched = match_models(first, second)
    found = compare_matched(matched)
    numbers, why = None, ""
    if values or not (structure_only or found.is_empty):  # the same operators on the same values compute the same
        try:
            feeds = [draw_feeds(first, seed) for seed in range(draws)]
            with open_bench() as bench, limit_runs(bench, first):
                numbers = compare_numbers(matched, feeds, bench, values=values)
        except PassError as error:
            why = str(error)
    if as_json:
        typer.echo(json.dumps(_as_data(found, numbers, why), indent=2, ensure_ascii=False))
    else:
        typer.echo(diff_text(found, names=names, most=most), nl=False)
        typer.echo(numbers_text(numbers, why, most=most), nl=False)
    if not found.is_empty:
        raise typer.Exit(DIFFERENT)


def _as_data(found: Diff, numbers: Numbers | None, why: str) -> dict[str, Any]:
    return {"format_version": FORMAT_VERSION, **diff_as_data(found), **numbers_as_data(numbers, why)}
