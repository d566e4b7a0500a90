"""`onnxline bisect MODEL`: the pass at fault, and the smallest model that shows the fault; with `--metric` the layer
whose quantization costs the task most."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from pathlib import Path
from typing import Any, Final, Self

import typer
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from passes.bisect import BUDGET_S, Bisection, bisect, bisection_as_data, bisection_text
from passes.context import open_context
from passes.custom_ops import declare_ops
from passes.policy.policy import unknown_structure
from passes.recipe.recipe import steps_of
from passes.structures import structure_of
from passes.weights.detached import read_model
from passes.weights.files import save
from passes.why import file_of
from pipeline.commands.shared import (
    CONFIG_SUFFIXES,
    FORMAT_VERSION,
    add_command,
    custom_ops_of,
    folder_of_part,
    print_styled,
)
from pipeline.config import RunConfig, read_recipe, recipe_of_run
from pipeline.errors import UsageError
from pipeline.terminal import print_json, print_line
from pipeline.terminal.screen import ProgressBar, Screen

STYLES: Final = {"  - ": "red", "  + ": "green", "  ~ ": "yellow", "  ": "", "note": "yellow", "left out": "yellow"}
"""How a line begins → its style on a terminal."""

NOTHING: Final = 1
"""Exit code when the recipe has no such fault on this model."""


def register(app: typer.Typer) -> None:
    add_command(app, "bisect", bisect_model)


def bisect_model(
    model: Path,
    recipe: list[str] | None = None,
    lost: str | None = None,
    error: float | None = None,
    crash: bool = False,
    metric: bool = False,
    skip: list[str] | None = None,
    out: Path | None = None,
    budget_s: float = BUDGET_S,
    timeout_s: float = 60.0,
    part: str | None = None,
    as_json: bool = False,
) -> None:
    """Find the first pass of a recipe that is at fault, and write the smallest model on which it is.

    The recipe runs as its libraries run it, with nothing kept or reverted. The exit code is 1 if nothing is wrong.
    """
    _check_target(lost, error, crash, metric)
    if metric:
        if recipe or skip or out is not None or part is not None:
            raise UsageError("--metric looks at the layers of a run; leave out --recipe, --skip, --out and --part")
        _find_costly_layer(model, budget_s, as_json=as_json)
        return
    if lost is not None and structure_of(lost) is None:  # refused before a model is exported
        raise UsageError(f"--lost: {unknown_structure(lost)}")
    is_config = model.suffix in CONFIG_SUFFIXES
    model = model if is_config else folder_of_part(model, part)
    if not recipe and is_config:
        recipe = [str(model)]
    steps = steps_of(read_recipe(recipe) if recipe else recipe_of_run(model))
    if not steps:
        raise UsageError("the recipe has no step, so none can be at fault; give --recipe, such as default,onnxsim")
    with (
        declare_ops(custom_ops_of(model)),
        tempfile.TemporaryDirectory(prefix="onnxline-") as folder,
        _BisectProgress() as progress,
    ):
        if is_config:
            progress("exporting the model", model.name, 0, 0)
        file = _export(model, Path(folder), part) if is_config else file_of(model)
        source = read_model(file)
        with open_context(timeout_s) as context:
            wishes: dict[str, Any] = {"lost": lost, "error": error, "skip": skip or (), "budget_s": budget_s}
            finding = bisect(source, steps, None, context, **wishes, progress=False, observer=progress)
            written = _write(finding, out, model, file)
    if as_json:
        data = {"format_version": FORMAT_VERSION, **bisection_as_data(finding, written)}
        print_json(data)
    else:
        print_styled(bisection_text(finding, written), STYLES)
    if finding.culprit is None:
        raise typer.Exit(NOTHING)


def _export(config_file: Path, folder: Path, part: str | None) -> Path:
    """Export the model of a configuration to `folder`; return that file, or the ONNX file that it names.

    Raises:
        UsageError: the configuration or its model is wrong, or its weights stay unread.
    """
    from pipeline.export import OnnxSource, export_onnx
    from pipeline.stages.source import open_source

    config = RunConfig.from_yaml(config_file)
    if part is not None or config.model.part_names:
        if part not in config.model.part_names:
            listing = " or ".join(f"--part {name}" for name in config.model.part_names) or "no --part"
            raise UsageError(f"{config_file}: found {(part and f'--part {part}') or 'no --part'}, expected {listing}")
        config = config.of_part(part)
    if config.export.weights == "referenced":
        raise UsageError(
            f"{config_file}: bisect runs passes that read weights, and `export.weights: referenced` leaves them "
            "unread; bisect a configuration of a smaller model of the same kind"
        )
    source = open_source(config)
    if isinstance(source, OnnxSource):
        return source.path
    path = folder / "exported.onnx"
    export_onnx(source, config.export).save(path)
    return path


class _BisectProgress:
    """Shows progress: a bar on a terminal, elsewhere a line on standard error for each part of the work."""

    def __init__(self) -> None:
        console = Screen(stderr=True)
        self._bar = ProgressBar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, detail="")
        self._last_part = ""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, what: str, detail: str, done: float, total: float) -> None:
        self._bar.update(self._task, description=what, detail=detail, completed=done, total=total or None)
        if self._bar.disable and what != self._last_part:
            print_line(f"bisect: {what}", err=True)
        self._last_part = what


def _find_costly_layer(config_file: Path, budget_s: float, *, as_json: bool) -> None:
    """Show what each layer costs the metric of the task.

    Raises:
        UsageError: there is no configuration with `quantsim.metric`.
    """
    from pipeline.console import RunConsole
    from pipeline.quantsim import QuantSim
    from pipeline.quantsim.parts import PartsQuantSimResult

    config = RunConfig.from_yaml(config_file) if config_file.suffix in CONFIG_SUFFIXES else None
    if config is None or config.quantsim is None or config.quantsim.metric is None:
        raise UsageError(f"bisect --metric: found {config_file}, expected a configuration (.yaml) with quantsim.metric")
    with RunConsole(quiet=as_json) as screen:
        result = QuantSim(config, None, screen.show, progress=False, costs_budget_s=budget_s).run()
        costs = result.costs if isinstance(result, PartsQuantSimResult) else result.report.costs
    assert costs is not None
    if as_json:
        print_json({"format_version": FORMAT_VERSION, **dataclasses.asdict(costs)})
    else:
        print_styled("".join(f"{line}\n" for line in costs.lines()), STYLES)
    if not costs.costs or costs.costs[0].loss <= 0:
        raise typer.Exit(NOTHING)


def _check_target(lost: str | None, error: float | None, crash: bool, metric: bool) -> None:
    given = [
        name
        for name, is_given in (
            ("--lost", lost is not None),
            ("--error", error is not None),
            ("--crash", crash),
            ("--metric", metric),
        )
        if is_given
    ]
    if len(given) != 1:
        raise UsageError(
            f"bisect looks for one thing, found {' and '.join(given) or 'none'}; expected one of --lost KIND, "
            "--error TOLERANCE, --crash and --metric"
        )


def _write(finding: Bisection, out: Path | None, model: Path, source: Path) -> str:
    """Write the smallest model, which is never written over the `source`; returns its file, empty where there is none.

    Raises:
        UsageError: it cannot be written.
    """
    if finding.culprit is None or finding.smallest is None:
        return ""
    stem = model.resolve().name if model.is_dir() else model.stem
    name = f"bisect-{stem}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', finding.culprit.name)}.onnx"
    path = Path(name) if out is None else out / name if out.is_dir() else out
    if path.exists() and path.samefile(source):
        raise UsageError(f"--out {path} is the model itself, which is not written over; give another file")
    try:
        save(finding.smallest.model, path)
    except OSError as error:
        raise UsageError(f"the smallest model cannot be written to {path}: {error.strerror}; give --out FILE") from None
    return str(path)
