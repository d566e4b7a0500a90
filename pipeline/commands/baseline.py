"""`onnxline baseline accept|check CONFIG`: keep the results of a run in a text file; see when they change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from pipeline.commands.shared import Json, Overrides
from pipeline.errors import CheckFailed, UsageError

__all__ = ["FORMAT_VERSION", "register"]

FORMAT_VERSION: Final = 1
"""Version of the output of `--json`."""

Config = Annotated[Path, typer.Argument(help="The configuration file.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="DIR", help="Folder of the artifacts (default runs/NAME).")
]
File = Annotated[Path | None, typer.Option(help="The baseline (default: beside CONFIG, with the ending .baseline).")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Keep the results of a run in a text file for git, and see when they change.")
    group.command("accept")(accept)
    group.command("check")(check)
    app.add_typer(group, name="baseline")


def accept(
    config: Config, out: Out = None, file: File = None, overrides: Overrides = None, as_json: Json = False
) -> None:
    """Run CONFIG and write its results to the baseline."""
    from pipeline.baseline import check_place, file_beside, write_baseline

    path = file or file_beside(config)
    check_place(path)
    found = _run(config, out, overrides, as_json)
    lines = _changes_since(path, found)
    write_baseline(found, path)
    _show(path, lines, found, as_json)
    if not as_json:
        typer.echo(f"written to {path}")


def check(
    config: Config, out: Out = None, file: File = None, overrides: Overrides = None, as_json: Json = False
) -> None:
    """Run CONFIG and compare with the baseline; the exit code is 1 on any difference."""
    from pipeline.baseline import changes, file_beside, read_baseline

    path = file or file_beside(config)
    known = read_baseline(path)
    found = _run(config, out, overrides, as_json)
    lines = changes(known, found)
    _show(path, lines, found, as_json)
    if not lines:
        if not as_json:
            typer.echo(f"as in {path}")
        return
    only = " nothing but versions changed;" if all(line.startswith("versions") for line in lines) else ""
    raise CheckFailed(
        f"{len(lines)} entries are not as in {path};{only} "
        f"if that is right, `onnxline baseline accept {config}` and commit the file"
    )


def _run(config: Path, out: Path | None, overrides: list[str] | None, quiet: bool) -> dict[str, Any]:
    from pipeline.config import RunConfig

    settings = RunConfig.from_yaml(config, tuple(overrides or ()))
    from pipeline.stages.check import check_settings, default_folder
    from pipeline.workspace import Workspace

    check_settings(settings, Workspace(default_folder(settings, out)))
    from pipeline.baseline import baseline_of
    from pipeline.console import RunConsole
    from pipeline.run import Pipeline

    with RunConsole(quiet=quiet) as screen:
        return baseline_of(Pipeline(settings, out, screen.show, is_checked=True).run().report)


def _show(path: Path, lines: list[str], found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        data = {"format_version": FORMAT_VERSION, "file": str(path), "changes": lines, "found": found}
        typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
        return
    for line in lines:
        typer.echo(line)


def _changes_since(path: Path, found: dict[str, Any]) -> list[str]:
    """The changes since the baseline at `path`; none where no readable baseline exists."""
    from pipeline.baseline import changes, read_baseline

    try:
        return changes(read_baseline(path), found)
    except UsageError:
        return []
