"""`onnxline diff A.onnx B.onnx`: how the second model differs, by structure and by numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import typer

from passes.context import limit_runs, open_context
from passes.diff import (
    compare_layers,
    compare_matched,
    compare_numbers,
    diff_as_data,
    diff_text,
    draw_inputs,
    layers_as_data,
    layers_text,
    match_models,
    numbers_as_data,
    numbers_text,
)
from passes.errors import PassError
from passes.weights.detached import read_model
from passes.why import file_of
from pipeline.commands.shared import add_command, print_styled
from pipeline.errors import UsageError
from pipeline.terminal import print_json

FORMAT_VERSION: Final = 1
"""Version of the output of `--json`."""

MOST: Final = 20
"""Entries of one kind that are written out by default."""

DIFFERENT: Final = 1
"""Exit code when there is a difference."""


def register(app: typer.Typer) -> None:
    add_command(app, "diff", diff)


def diff(
    before: Path,
    after: Path,
    layers: bool = False,
    values: bool = False,
    structure_only: bool = False,
    names: bool = False,
    most: int | None = None,
    everything: bool = False,
    draws: int | None = None,
    as_json: bool = False,
) -> None:
    """Compare B with A, by structure and by numbers; the exit code is 1 if they differ.

    Nodes are matched by what they compute: other names and another order of independent nodes are no difference.
    """
    if structure_only and (layers or values):
        raise UsageError("--structure-only runs no model, and --layers and --values need runs; leave one of them out")
    if everything and most is not None:
        raise UsageError("--all writes out every entry, so --most has no effect; leave one of them out")
    first, second = (read_model(file_of(path)) for path in (before, after))
    matched = match_models(first, second)
    found = compare_matched(matched)
    numbers, table, why = None, None, ""
    # The same operators on the same values compute the same.
    if layers or values or not (structure_only or found.is_empty):
        try:
            with open_context() as context, limit_runs(context, first):
                drawn = draw_inputs(matched, context, draws)
                numbers = compare_numbers(matched, drawn, context, values=values)
                if layers:
                    table = compare_layers(matched, drawn, context)
        except PassError as error:
            why = str(error)
    if as_json:
        data = {"format_version": FORMAT_VERSION, **diff_as_data(found), **numbers_as_data(numbers, why)}
        if table is not None:
            data["layers"] = layers_as_data(table)
        print_json(data)
    else:
        cut = None if everything else most or MOST
        text = diff_text(found, names=names, most=cut) + numbers_text(numbers, why, most=cut)
        print_styled(text + (layers_text(table, most=cut and cut * ROWS) if table is not None else ""), STYLES)
    if not found.is_empty:
        raise typer.Exit(DIFFERENT)


ROWS: Final = 5
"""Rows of the table of layers for each entry that `--most` allows: a row is short."""

STYLES: Final = {"  added": "green", "  removed": "red", "  ": "", "no difference": "green", "": "bold"}
"""How a line begins → its style on a terminal."""
