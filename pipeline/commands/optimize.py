"""`onnxline optimize IN.onnx -o OUT.onnx`: the passes with their proof, on an ONNX file alone. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from passes.suggest import plural
from pipeline.commands.shared import Keep, Quiet, Recipe, Skip, Verbose, check_output, split_names
from pipeline.errors import CheckFailed, UsageError

__all__ = ["register"]

MOST_LINES = 12
"""How many encodings that were not carried are listed without `--verbose`."""


def register(app: typer.Typer) -> None:
    app.command("optimize")(optimize)


def optimize(
    model: Annotated[Path, typer.Argument(metavar="IN.onnx", help="The ONNX file; it stays as it is.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT.onnx", help="Where the result is written.")],
    keep: Keep = None,
    skip: Skip = None,
    recipe: Recipe = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if a step was reverted or failed.")] = False,
    proof: Annotated[
        Literal["numbers", "structure"],
        typer.Option(help="structure: run nothing, and leave the weights unread; for models that fit nowhere."),
    ] = "numbers",
    encodings: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="AIMET's encodings of IN.onnx; those of the result are written to OUT.encodings."
        ),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Seconds for one call of native code.")
    ] = 600.0,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Run the passes on an ONNX file, prove each change, and write the result; works without torch."""
    import passes
    from passes.encodings.aimet import aimet_text, read_aimet
    from passes.encodings.report import describe_carried, summarize_carried
    from passes.recipe import DEFAULT_RECIPE
    from passes.weights.files import save, write_errors
    from pipeline.config import read_recipe
    from pipeline.config.paths import describe_absence
    from pipeline.console import RunConsole
    from pipeline.events import PassEnded, PassesEnded, Progress, StageStarted

    if not model.is_file():
        raise UsageError(f"{model}: {describe_absence(model)}; expected an ONNX file")
    check_output(out, model)
    given, version = (None, None) if encodings is None else read_aimet(encodings)
    beside = out.with_suffix(".encodings")
    if encodings is not None and beside.exists() and beside.samefile(encodings):
        raise UsageError(f"--encodings {encodings} is where the result's are written; name OUT.onnx otherwise")
    screen = RunConsole(verbose=verbose, quiet=quiet, keep=split_names(keep or ()))

    def observe(name: str, index: int, total: int, row: passes.PassRow | None) -> None:
        screen.show(Progress("passes", name, index, total) if row is None else PassEnded(row))

    with screen:
        screen.show(StageStarted("passes"))
        run = passes.optimize(
            model,
            DEFAULT_RECIPE if recipe is None else read_recipe(recipe),
            split_names(skip or ()),
            split_names(keep or ()),
            proof=proof,
            timeout_s=timeout_s,
            encodings=given,
            observer=observe,
        )
        if run.invalid:
            raise CheckFailed(f"the result is not valid ONNX, so it was not written: {run.invalid}")
        with write_errors(out):
            save(run.model, out, referring=bool(run.model.unread()))
    screen.show(PassesEnded(run.rows, run.structures))
    screen.show_passes()
    screen.line(f"model: {out}, {plural(len(run.model.proto.graph.node), 'node')}")
    for remark in run.remarks:
        screen.line(f"note: {remark}")
    if run.encodings is not None and version is not None:
        constants = {tensor.name for tensor in run.model.proto.graph.initializer}
        with write_errors(beside):
            beside.write_text(aimet_text(run.encodings.encodings, constants, version), encoding="utf-8")
        screen.line(f"{summarize_carried(run.encodings)}: {beside}")
        lines = list(describe_carried(run.encodings))
        for line in lines if verbose else lines[:MOST_LINES]:
            screen.line(line)
        if len(lines) > MOST_LINES and not verbose:
            screen.line(f"{len(lines) - MOST_LINES} more (--verbose shows all)")
    if strict and run.reverted:
        were = "was" if len(run.reverted) == 1 else "were"
        raise CheckFailed(f"--strict: {plural(len(run.reverted), 'step')} {were} reverted or failed, as shown above")
