"""`onnxline baseline accept|check CONFIG`: keep what a run comes to in a text file; see when that changes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.errors import CheckFailed, UserMistake
from pipeline.regression import baseline_of, changes, file_beside, read_baseline, write_baseline
from pipeline.screen import Screen

__all__ = ["register"]

Config = Annotated[Path, typer.Argument(help="The configuration file.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the artifacts (default runs/<name>).")]
File = Annotated[Path | None, typer.Option(help="The baseline (default: beside CONFIG, with the ending .baseline).")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override one setting; YAML on the right.")
]


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="What a run comes to, in a text file for git: keep it, and see when it changes.")
    group.command("accept")(accept)
    group.command("check")(check)
    app.add_typer(group, name="baseline")


def accept(config: Config, out: Out = None, file: File = None, overrides: Overrides = None) -> None:
    """Run CONFIG, and keep what it comes to."""
    path = file or file_beside(config)
    found = _found(config, out, overrides)
    told = _changes_since(path, found)
    write_baseline(found, path)
    for line in told:
        typer.echo(line)
    typer.echo(f"written to {path}")


def check(config: Config, out: Out = None, file: File = None, overrides: Overrides = None) -> None:
    """Run CONFIG, and compare what it comes to with what was accepted; the exit code is 1 if anything is otherwise."""
    path = file or file_beside(config)
    known = read_baseline(path)
    found = _found(config, out, overrides)
    told = changes(known, found)
    if not told:
        typer.echo(f"as in {path}")
        return
    for line in told:
        typer.echo(line)
    only = " nothing but versions changed;" if all(line.startswith("versions") for line in told) else ""
    raise CheckFailed(
        f"{len(told)} entries are not as in {path};{only} "
        f"if that is right, `onnxline baseline accept {config}` and commit the file"
    )


def _found(config: Path, out: Path | None, overrides: list[str] | None) -> dict[str, Any]:
    from pipeline.config import RunConfig  # these need torch, and other commands do without
    from pipeline.run import Pipeline

    settings = RunConfig.from_yaml(config, tuple(overrides or ()))
    with Screen() as screen:
        return baseline_of(Pipeline(settings, out, screen.show).run().report)


def _changes_since(path: Path, found: dict[str, Any]) -> list[str]:
    """What is accepted that was not so before; nothing where there is no baseline that can be read."""
    try:
        return changes(read_baseline(path), found)
    except UserMistake:
        return []
