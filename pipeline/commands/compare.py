"""`onnxline compare A B`: run two ONNX models on the same inputs, and compare outputs, layers and common values."""

from __future__ import annotations

from pathlib import Path

import typer

from pipeline.commands.shared import FORMAT_VERSION, add_command, locate_parts, print_styled
from pipeline.terminal import print_json

DIFFERENT = 1
"""Exit code when an output is out of tolerance, or the second model does not run on a draw."""


def register(app: typer.Typer) -> None:
    add_command(app, "compare", compare)


def compare(
    before: Path,
    after: Path,
    data: list[str] | None = None,
    most: int = 20,
    part: str | None = None,
    as_json: bool = False,
) -> None:
    """Run two ONNX models on the same inputs; compare outputs, layers and common values."""
    from passes.tools.comparison import compare as compare_models
    from passes.why import file_of

    files = [file_of(path) for path in locate_parts((before, after), part)]
    feeds = []
    if data:
        from pipeline.export.load import read_onnx_file  # with pydantic: 0.1 s
        from pipeline.verify.user_inputs import read_samples

        specs = read_onnx_file(str(files[0])).inputs
        feeds = [arrays for _, arrays in read_samples(data, specs, "--data")]
    found = compare_models(files[0], files[1], feeds)
    if as_json:
        print_json({"format_version": FORMAT_VERSION, **found.as_data()})
    else:
        print_styled(found.text(most), {"  ": "", "": "bold"})
    if not found.ok:
        raise typer.Exit(DIFFERENT)
