"""`onnxline baseline accept|check CONFIG`: keep the results of a run in a text file; see when they change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from passes.suggest import plural
from pipeline.commands.shared import add_command
from pipeline.errors import CheckFailed, UsageError
from pipeline.terminal import print_json, print_line

if TYPE_CHECKING:
    from pipeline.config import RunConfig

FORMAT_VERSION: Final = 1
"""Version of the output of `--json`."""


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Keep the results of a run in a text file for git, and see when they change.")
    add_command(group, "baseline accept", accept)
    add_command(group, "baseline check", check)
    app.add_typer(group, name="baseline")


def accept(
    source: str,
    out: Path | None = None,
    file: Path | None = None,
    overrides: list[str] | None = None,
    as_json: bool = False,
) -> None:
    """Run a configuration or a model, and write its results to the baseline."""
    from pipeline.baseline import check_place, write_baseline

    settings, path = _read(source, overrides, file)
    check_place(path)
    found = _run(settings, out, as_json)
    lines = _changes_since(path, found)
    write_baseline(found, path)
    _show(path, lines, found, as_json)
    if not as_json:
        print_line(f"written to {path}")


def check(
    source: str,
    out: Path | None = None,
    file: Path | None = None,
    overrides: list[str] | None = None,
    as_json: bool = False,
) -> None:
    """Run a configuration or a model, and compare with the baseline; the exit code is 1 on any difference."""
    from pipeline.baseline import changes, read_baseline

    settings, path = _read(source, overrides, file)
    known = read_baseline(path)
    found = _run(settings, out, as_json)
    lines = changes(known, found)
    _show(path, lines, found, as_json)
    if not lines:
        if not as_json:
            print_line(f"as in {path}")
        return
    only = " nothing but versions changed;" if all(line.startswith("versions") for line in lines) else ""
    are = "is" if len(lines) == 1 else "are"
    raise CheckFailed(
        f"{plural(len(lines), 'entry', 'entries')} {are} not as in {path};{only} "
        f"if that is right, `onnxline baseline accept {source}` and commit the file"
    )


def _read(source: str, overrides: list[str] | None, file: Path | None) -> tuple[RunConfig, Path]:
    """The configuration of the run, and the file of its baseline."""
    from pipeline.baseline import file_beside
    from pipeline.config import RunConfig, is_reference

    settings = RunConfig.from_source(source, tuple(overrides or ()))
    if is_reference(source):  # a file may have several
        return settings, file or Path(source).with_name(f"{settings.name}.baseline")
    return settings, file or file_beside(Path(source))


def _run(settings: RunConfig, out: Path | None, quiet: bool) -> dict[str, Any]:
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
        print_json(data)
        return
    for line in lines:
        print_line(line)


def _changes_since(path: Path, found: dict[str, Any]) -> list[str]:
    """The changes since the baseline at `path`; none where no readable baseline exists."""
    from pipeline.baseline import changes, read_baseline

    try:
        return changes(read_baseline(path), found)
    except UsageError:
        return []
