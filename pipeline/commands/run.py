"""`onnxline run CONFIG|MODEL`: from a source to a verified model, its IR and its plan; `onnxline check`: what such
a run would do, or what is wrong with its configuration, before a model is opened."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from pipeline.commands.shared import (
    Keep,
    Overrides,
    Quiet,
    Recipe,
    Skip,
    Source,
    StripMetadata,
    Verbose,
    check_output,
    describe_settings,
    wishes_of,
)
from pipeline.errors import UsageError
from pipeline.terminal import print_line, print_text

Folder = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Folder of the artifacts (default runs/NAME).")
]


def register(app: typer.Typer) -> None:
    app.command("run")(run)
    app.command("check")(check)


def run(
    source: Source,
    out: Folder = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE.onnx", help="Write the final model here, too.")
    ] = None,
    keep: Keep = None,
    skip: Skip = None,
    recipe: Recipe = None,
    without_metadata: StripMetadata = False,
    regions: Annotated[
        str | None,
        typer.Option(metavar="SIZES", help="Memories from the fastest on, such as sram:2MiB,dram, for a memory map."),
    ] = None,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all but a torch model, and say what would run.")
    ] = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Run a model or a configuration: export, passes with proof, verified model, IR and plan."""
    from pipeline.config import RunConfig

    settings = [*(overrides or ()), *([f"runtime.regions={json.dumps(regions)}"] if regions is not None else [])]
    settings += ["passes.strip_metadata=true"] if without_metadata else []
    config = RunConfig.from_source(source, settings, wishes_of(recipe, keep, skip))
    if output is not None:
        check_output(output, Path(config.model.onnx) if config.model.onnx else None)
        if config.export.weights == "referenced":
            raise UsageError(
                "-o copies the weights, and export.weights is referenced, which leaves them where they are; "
                "leave one of the two out"
            )
    from pipeline.stages.check import check_settings, default_folder
    from pipeline.workspace import Workspace

    folder = default_folder(config, out)
    steps = check_settings(config, Workspace(folder))
    if config.model.onnx is not None:
        from pipeline.export.load import read_onnx_file

        read_onnx_file(config.model.onnx, config.model)  # needs milliseconds, and no torch
    if dry_run:
        print_text(describe_settings(config, steps, folder))
        return
    from pipeline.console import RunConsole
    from pipeline.run import Pipeline  # loads torch, which takes seconds: after all that can be wrong without it

    screen = RunConsole(verbose=verbose, quiet=quiet, keep=config.passes.keep)
    begun = time.time()
    try:
        with screen:
            result = Pipeline(config, out, screen.show, is_checked=True).run()
    except Exception:
        screen.show_failure(folder, begun)  # also when a later stage failed
        raise
    screen.conclude(result)
    if output is not None:
        copy_model(result.model, output)
        screen.line(f"model: {output}")


def check(
    source: Source,
    out: Folder = None,
    keep: Keep = None,
    skip: Skip = None,
    recipe: Recipe = None,
    overrides: Overrides = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name what this target cannot take of an ONNX file; exit 1 if anything."),
    ] = None,
) -> None:
    """Check a configuration, and an ONNX file that it names, and say what a run would do."""
    if target is not None:
        if keep or skip or recipe or overrides or out:
            raise UsageError("--target looks at a model as it is, so it takes no other option; leave them out")
        check_model(source, target)
        return
    run(source, out, keep=keep, skip=skip, recipe=recipe, overrides=overrides, dry_run=True)


def check_model(source: str, target: str) -> None:
    """Print what `target` does not take of the ONNX file `source`.

    Raises:
        UsageError: there is no such target, or `source` is no ONNX file.
        Exit: with code 1, where there is anything.
    """
    from passes.suggest import plural
    from passes.weights.detached import read_model
    from pipeline.quantsim.target_check import check_target
    from pipeline.quantsim.target_tables import load_target

    table = load_target(target)
    if Path(source).suffix != ".onnx":
        raise UsageError(
            f"--target {target}: found {source!r}, expected an ONNX file: run the configuration first, and check the "
            "model.onnx of its folder"
        )
    report = check_target(read_model(Path(source), unread=True), table)
    for remark in report.remarks:
        print_line(f"note: {remark}")
    for found in report.obstructions:
        print_line(f"{found.what} ({plural(len(found.places), 'place')}): {found.reason}")
        print_line(f"  what helps: {found.advice}")
        print_line(f"  where: {', '.join(found.places)}")
    if report.obstructions:
        raise typer.Exit(1)
    print_line(f"{report.title} takes every operator of {source}")


def copy_model(model: Path, path: Path) -> None:
    """Write the model at `model` to `path`, with its weights."""
    from passes.weights.detached import read_model
    from passes.weights.files import write_model

    write_model(read_model(model), path)
