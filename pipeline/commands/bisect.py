"""`onnxline bisect MODEL`: the pass that is at fault, and the smallest model on which it is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Final

import typer

from passes.base import Workbench
from passes.bench import limit_runs, open_bench
from passes.bisect import BUDGET_S, Breakdown, Deviation, Fault, Finding, Loss, bisect, finding_as_data, finding_text
from passes.model.files import save
from passes.model.weights import DetachedModel, read_model
from passes.recipe import steps_of
from passes.why import file_of
from pipeline.config import read_recipe, recipe_of_run
from pipeline.errors import UserMistake

__all__ = ["FORMAT_VERSION", "register"]

FORMAT_VERSION: Final = 1
"""Of what `--json` writes."""

NOTHING: Final = 1
"""Exit code when nothing is wrong with the recipe on this model."""


def register(app: typer.Typer) -> None:
    app.command("bisect")(bisect_model)


def bisect_model(
    model: Annotated[Path, typer.Argument(help="An ONNX file, or the folder of a run.")],
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            metavar="R",
            help="Steps, as in passes.recipe, or a YAML file that has them; by default the recipe of the run whose "
            "folder MODEL is, else default,onnxsim.",
        ),
    ] = None,
    lost: Annotated[
        str | None, typer.Option(metavar="KIND", help="Look for who loses a structure: qkv, gelu, op:Softmax, …")
    ] = None,
    error: Annotated[
        float | None, typer.Option(metavar="TOL", min=0, help="Look for who moves an output by more than this.")
    ] = None,
    crash: Annotated[bool, typer.Option("--crash", help="Look for who crashes, hangs or fails.")] = False,
    skip: Annotated[list[str] | None, typer.Option(help="A pass or group to leave out; may be repeated.")] = None,
    out: Annotated[Path | None, typer.Option(help="The smallest model; by default bisect-MODEL-PASS.onnx.")] = None,
    budget_s: Annotated[float, typer.Option(min=0, help="Seconds for making the model smaller; 0: do not.")] = BUDGET_S,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds for one call of native code.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")] = False,
) -> None:
    """Find the first pass of a recipe that is at fault, and write the smallest model on which it is.

    The recipe runs as its libraries run it, with nothing kept or reverted. The exit code is 1 if nothing is wrong.
    """
    _check_one(lost, error, crash)
    steps = steps_of(read_recipe(recipe) if recipe else recipe_of_run(model))
    source = read_model(file_of(model))
    with open_bench(timeout_s) as bench, limit_runs(bench, source):
        fault = _fault(lost, error, source, bench)
        finding = bisect(source, steps, fault, bench, skip=skip or (), budget_s=budget_s)
        file = _written(finding, out, model)
    if as_json:
        data = {"format_version": FORMAT_VERSION, **finding_as_data(finding, file)}
        typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
    else:
        typer.echo(finding_text(finding, file), nl=False)
    if finding.culprit is None:
        raise typer.Exit(NOTHING)


def _check_one(lost: str | None, error: float | None, crash: bool) -> None:
    given = [
        name
        for name, is_given in (("--lost", lost is not None), ("--error", error is not None), ("--crash", crash))
        if is_given
    ]
    if len(given) != 1:
        raise UserMistake(
            f"bisect looks for one thing, found {' and '.join(given) or 'none'}; expected one of --lost KIND, "
            "--error TOLERANCE and --crash"
        )


def _fault(lost: str | None, error: float | None, source: DetachedModel, bench: Workbench) -> Fault:
    if lost is not None:
        return Loss.of(lost, source)
    return Breakdown() if error is None else Deviation.of(error, source, bench)


def _written(finding: Finding, out: Path | None, model: Path) -> str:
    """The file of the smallest model; empty where there is none.

    Raises:
        UserMistake: it cannot be written.
    """
    if finding.culprit is None or finding.smallest is None:
        return ""
    stem = model.resolve().name if model.is_dir() else model.stem
    name = f"bisect-{stem}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', finding.culprit.name)}.onnx"
    path = Path(name) if out is None else out / name if out.is_dir() else out
    if path.exists() and path.samefile(file_of(model)):
        raise UserMistake(f"--out {path} is the model itself, which is not written over; give another file")
    try:
        save(finding.smallest.model, path)
    except OSError as error:
        raise UserMistake(
            f"the smallest model cannot be written to {path}: {error.strerror}; give --out FILE"
        ) from None
    return str(path)
