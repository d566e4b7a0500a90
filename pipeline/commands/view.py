"""`onnxline view A [B]`: one page with the graph of a model, or of two with their difference drawn."""

from __future__ import annotations

import tempfile
import webbrowser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from pipeline.commands.shared import add_command, locate_parts
from pipeline.errors import MissingExtra, UsageError
from pipeline.terminal import print_line


def register(app: typer.Typer) -> None:
    add_command(app, "view", view)


def view(
    model: Path,
    other: Path | None = None,
    out: Path | None = None,
    errors: bool = False,
    explorer: bool = False,
    part: str | None = None,
) -> None:
    """Draw the graph of a model, or of two with their difference, as one page that needs no server."""
    from passes.viewer import render, view_data
    from passes.weights.detached import open_model
    from passes.weights.files import write_file
    from passes.why import file_of

    if errors and other is None:
        raise UsageError("--errors compares two models; name the second one")
    if explorer and out is not None:
        raise UsageError("--explorer opens Model Explorer, and -o writes a page; leave one of them out")
    paths = [path for path in (model, other) if path is not None]
    files = [file_of(path) for path in locate_parts(paths, part)]
    models, ratios = [open_model(file) for file in files], None
    if errors:
        from passes.diff.model_matching import same_outputs
        from passes.tools.comparison import compare

        found = compare(models[0], models[-1]).numbers
        ratios = {value.before: value.errors.sqnr_db for value in found.values}
        outputs = same_outputs(*(model.proto.graph for model in models))
        ratios |= {outputs[name]: errors.sqnr_db for name, errors in found.outputs.items()}
    names = [*short_names(paths), ""]
    data = view_data(*models, errors=ratios, titles=(names[0], names[1]))
    if explorer:
        open_explorer(files, data)
        return
    shows = out is None
    if out is None:
        out = Path(tempfile.mkdtemp(prefix="onnxline-")) / "view.html"
    write_file(out, render(data))
    print_line(f"page: {out}")
    if shows:
        webbrowser.open(out.as_uri())


def short_names(paths: Sequence[Path]) -> list[str]:
    """The ends of paths that tell them apart: `model.onnx`, or `old/model.onnx` next to `new/model.onnx`."""
    names = [path.name or str(path) for path in paths]
    for count in range(2, max(len(path.parts) for path in paths) + 1):
        if len(set(names)) == len(names):
            break
        names = [str(Path(*path.parts[-count:])) for path in paths]
    return names


def open_explorer(files: Sequence[Path], data: Mapping[str, Any]) -> None:
    """Start Model Explorer's server on the models, with what `data` says of their nodes, until it is stopped.

    Raises:
        MissingExtra: Model Explorer is not installed.
    """
    try:
        import model_explorer  # pyright: ignore[reportMissingImports] # an extra
    except ModuleNotFoundError as error:
        raise MissingExtra("model_explorer", "--explorer") from error
    from passes.viewer import explorer

    config = model_explorer.config()
    for file, scene in zip(files, data["scenes"], strict=True):
        config.add_model_from_path(explorer.graph_id(file), adapterId=explorer.ADAPTER)
        for title, table in explorer.node_data(scene, file).items():
            config.add_node_data(title, table, model_name=file.name)
    model_explorer.visualize_from_config(config, extensions=[explorer.__name__])
