"""`onnxline view A [B]`: one page with the graph of a model, or of two with their difference drawn."""

from __future__ import annotations

import math
import tempfile
import webbrowser
from pathlib import Path

import typer

from pipeline.commands.shared import add_command, folder_of_part
from pipeline.errors import UsageError
from pipeline.terminal import print_line


def register(app: typer.Typer) -> None:
    add_command(app, "view", view)


def view(
    model: Path,
    other: Path | None = None,
    out: Path | None = None,
    errors: bool = False,
    part: str | None = None,
) -> None:
    """Draw the graph of a model, or of two with their difference, as one page that needs no server."""
    from passes.tools.comparison import compare
    from passes.viewer import view_models
    from passes.weights.files import write_errors
    from passes.why import file_of

    if errors and other is None:
        raise UsageError("--errors compares two models; name the second one")
    paths = [path for path in (model, other) if path is not None]
    files = [file_of(path if path.is_file() else folder_of_part(path, part)) for path in paths]
    ratios = None
    if errors:
        found = compare(files[0], files[1]).numbers
        ratios = {value.before: value.errors.sqnr_db for value in found.values}
        ratios |= {name: math.inf if kept.sqnr_db == math.inf else kept.sqnr_db for name, kept in found.outputs.items()}
    names = [str(path) for path in paths] + [""]
    page = view_models(files[0], files[1] if len(files) > 1 else None, errors=ratios, titles=(names[0], names[1]))
    shows = out is None
    if out is None:
        out = Path(tempfile.mkdtemp(prefix="onnxline-")) / "view.html"
    with write_errors(out):
        out.write_text(page, encoding="utf-8")
    print_line(f"page: {out}")
    if shows:
        webbrowser.open(out.as_uri())
