"""Runs that come again.

`onnxline batch PATTERN…` runs many configurations over processes or a Ray cluster, and prints one table. `onnxline
baseline accept|check CONFIG` keeps the results of a run in a text file, and sees when they change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from passes.suggest import plural
from pipeline.commands.github import Format, annotate, check_form
from pipeline.commands.shared import FORMAT_VERSION, add_command
from pipeline.errors import CheckFailed, UsageError
from pipeline.jobs import choose_executor
from pipeline.jobs.console import JobsConsole
from pipeline.terminal import print_json, print_line
from pipeline.terminal.screen import Screen

if TYPE_CHECKING:
    from pipeline.batch import Row
    from pipeline.config import RunConfig


def register(app: typer.Typer) -> None:
    add_command(app, "batch", batch)
    group = typer.Typer(help="Keep the results of a run in a text file for git, and see when they change.")
    add_command(group, "baseline accept", accept)
    add_command(group, "baseline check", check)
    app.add_typer(group, name="baseline")


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
    with JobsConsole(sum(row.config is not None for row in planned), Screen(stderr=as_json), as_json) as screen:
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
    form: Format = "text",
    as_json: bool = False,
) -> None:
    """Run a configuration or a model, and compare with the baseline; the exit code is 1 on any difference."""
    from pipeline.baseline import changes, read_baseline

    check_form(form, json=as_json)
    settings, path = _read(source, overrides, file)
    known = read_baseline(path, source)
    found = _run(settings, out, as_json)
    parts = known.get("parts", {})
    for before, after in (
        (known, found),
        *((parts.get(name, {}), part) for name, part in found.get("parts", {}).items()),
    ):
        if "graph" not in before:  # of an earlier release
            after.pop("graph", None)
    lines = changes(known, found)
    if form == "github":
        rows = [line.rpartition(": ")[::2] for line in lines]
        annotate("onnxline baseline check", ("entry", "change"), rows, file=path)
    else:
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
    from pipeline.baseline import baseline_file
    from pipeline.config import RunConfig, is_reference

    settings = RunConfig.from_source(source, tuple(overrides or ()))
    if is_reference(source):  # a file may have several
        return settings, file or Path(source).with_name(f"{settings.name}.baseline")
    return settings, file or baseline_file(Path(source))


def _run(settings: RunConfig, out: Path | None, quiet: bool) -> dict[str, Any]:
    from pipeline.stages.check import check_settings, default_folder
    from pipeline.workspace import Workspace

    check_settings(settings, Workspace(default_folder(settings, out)))
    from passes.weights.detached import read_model
    from pipeline.baseline import baseline_of
    from pipeline.console import RunConsole
    from pipeline.parts import PartsResult
    from pipeline.quantsim.deoptimization import graph_entry
    from pipeline.run import Pipeline

    with RunConsole(quiet=quiet) as screen:
        if settings.quantsim is not None and settings.quantsim.metric is not None:
            settings.refuse_parts("baseline with quantsim.metric")
            from pipeline.quantsim import QuantSim

            result = QuantSim(settings, out, screen.show, progress=False).run()
            assert result.run is not None and result.report.metric is not None
            return {**baseline_of(result.run), "metric": result.report.metric.baseline_entry()}
        run = Pipeline(settings, out, screen.show, is_checked=True).run()
        found = baseline_of(run.report)
        if not isinstance(run, PartsResult):
            return {**found, "graph": graph_entry(read_model(run.model, unread=True))}
        for name, part in run.parts.items():
            found["parts"][name]["graph"] = graph_entry(read_model(part.model, unread=True))
        return found


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
