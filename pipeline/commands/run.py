"""What is done with a configuration.

`onnxline init` begins one, and `schema` describes one for editors. `check` says what a run would do, or what is wrong
before a model is opened; `run` goes from a source to a verified model, its IR and its plan; `train` trains the module
by recorded steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from passes.weights.files import write_errors
from pipeline.commands.shared import add_command, check_output, describe_settings, wishes_of
from pipeline.errors import UsageError
from pipeline.terminal import print_json, print_line, print_text

if TYPE_CHECKING:
    from pipeline.quantsim.profiles import TargetTable
    from pipeline.quantsim.target_check import Obstruction


def register(app: typer.Typer) -> None:
    add_command(app, "run", run)
    add_command(app, "check", check)
    add_command(app, "train", train)
    add_command(app, "init", init)
    add_command(app, "schema", schema)


def run(
    source: str,
    out: Path | None = None,
    output: Path | None = None,
    keep: list[str] | None = None,
    skip: list[str] | None = None,
    recipe: list[str] | None = None,
    without_metadata: bool = False,
    regions: str | None = None,
    device: str | None = None,
    overrides: list[str] | None = None,
    dry_run: bool = False,
    verbose: bool = False,
    quiet: bool = False,
) -> None:
    """Run a model or a configuration: export, passes with proof, verified model, IR and plan."""
    from pipeline.config import RunConfig

    given = {"runtime.regions": regions, "runtime.device": device}
    settings = [
        *(overrides or ()),
        *(f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None),
    ]
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
    source: str,
    out: Path | None = None,
    keep: list[str] | None = None,
    skip: list[str] | None = None,
    recipe: list[str] | None = None,
    overrides: list[str] | None = None,
    target: str | None = None,
    fix: bool = False,
    output: Path | None = None,
    encodings: Path | None = None,
) -> None:
    """Check a configuration, and an ONNX file that it names, and say what a run would do."""
    if encodings is not None:
        from pipeline.commands.quantsim import check_encodings_of

        check_encodings_of(source, target, encodings, is_alone=not (keep or skip or recipe or overrides or out or fix))
        return
    if target is not None:
        if keep or skip or recipe or overrides or out:
            raise UsageError(
                "--target looks at a model as it is, so it takes no other option but --fix; leave them out"
            )
        if fix == (output is None):
            raise UsageError("--fix writes a recipe: name its file with -o RECIPE.yaml, and give both or neither")
        check_model(source, target, output)
        return
    if fix or output is not None:
        found = "--fix" if fix else "-o"
        raise UsageError(
            f"found {found} without --target: --fix writes a recipe for a target; give --target NAME, --fix and -o "
            "RECIPE.yaml together"
        )
    run(source, out, keep=keep, skip=skip, recipe=recipe, overrides=overrides, dry_run=True)


def check_model(source: str, target: str, fixed: Path | None = None) -> None:
    """Print what `target` does not take of the ONNX file `source`, and write the recipe that mends it to `fixed`.

    Raises:
        UsageError: there is no such target, `source` is no ONNX file, or `fixed` is there already.
        Exit: with code 1, where there is anything that the recipe leaves.
    """
    from passes.suggest import join_first, plural
    from passes.weights.detached import read_model
    from pipeline.quantsim.profiles import load_target
    from pipeline.quantsim.target_trial import examine

    table = load_target(target)
    if Path(source).suffix != ".onnx":
        raise UsageError(
            f"--target {target}: found {source!r}, expected an ONNX file: run the configuration first, and check the "
            "model.onnx of its folder"
        )
    if fixed is not None and fixed.exists():
        raise UsageError(f"{fixed} is there already; name another file with -o")
    refused = Path("runs", "check") / f"{Path(source).stem}-{target}"
    report = examine(read_model(Path(source), unread=True), table, refused)
    for remark in report.remarks:
        print_line(f"note: {remark}")
    for found in report.obstructions:
        print_line(f"{found.what} ({plural(len(found.places), 'place')}): {found.reason}")
        print_line(f"  what helps: {found.advice}")
        print_line(f"  where: {', '.join(found.places)}")
        if found.origins:
            print_line(f"  from: {join_first(found.origins, MOST_ORIGINS)}")
    if report.obstructions and (fixed is None or write_fix(source, table, report.obstructions, fixed, refused)):
        raise typer.Exit(1)
    if report.obstructions:
        return
    print_line(f"{report.title} takes every operator of {source}")


MOST_ORIGINS: Final = 4


def write_fix(source: str, table: TargetTable, found: Sequence[Obstruction], path: Path, refused: Path) -> bool:
    """Write the recipe that mends what was `found`, after its steps were run on the model and proven; whether anything
    is left that the target does not take. The smallest models that the target refuses are saved in `refused`."""
    import yaml

    import passes
    from passes.suggest import plural
    from pipeline.quantsim.target_check import fix_recipe
    from pipeline.quantsim.target_trial import examine

    recipe: list[Any] = []
    tried: list[Any] = []
    left = tuple(found)
    for _ in range(MOST_ROUNDS):
        steps = [step for step in fix_recipe(left) if step not in tried]
        if not steps:
            break
        tried += steps
        recipe = sorted([*recipe, *steps], key=lambda step: "convert-opset" in step)  # the last, as others may need it
        run = passes.optimize(source, recipe)
        for row in run.reverted:
            print_line(f"note: {row.name} {row.status}: {row.reason}")
        changed = {"default", *(row.name for row in run.rows if row.changed and row not in run.reverted)}
        recipe = [step for step in recipe if (step if isinstance(step, str) else next(iter(step))) in changed]
        left = examine(run.model, table, refused).obstructions
    if not recipe:
        steps = ", ".join(step if isinstance(step, str) else next(iter(step)) for step in tried)
        effect = f"{steps} changed nothing of this model" if steps else "no step of onnxline mends any of it"
        print_line(f"{effect}, so no recipe is written")
        return True
    title = (
        f"# Mends what {table.title} does not take of {source}; run it with: onnxline optimize MODEL --recipe {path}"
    )
    _write(path, f"{title}\n{yaml.safe_dump({'recipe': recipe}, sort_keys=False)}")
    names = [step if isinstance(step, str) else next(iter(step)) for step in recipe]
    print_line(f"wrote {path}: {', '.join(names)}, each proven on {source}")
    kinds = f"{plural(len(left), 'reason')} left: {', '.join(dict.fromkeys(reason.what for reason in left))}"
    print_line(kinds if left else f"{table.title} takes every operator after these steps")
    return bool(left)


MOST_ROUNDS: Final = 3
"""A step may write operators that another step has to mend."""


def copy_model(model: Path, path: Path) -> None:
    """Write the model at `model` to `path`, with its weights."""
    from passes.weights.detached import read_model
    from passes.weights.files import write_model

    write_model(read_model(model), path)


def train(
    source: str, out: Path | None = None, overrides: list[str] | None = None, anew: bool = False, quiet: bool = False
) -> None:
    """Train the model of a configuration and write it as ONNX, or go on with a stopped training."""
    from pipeline.config import RunConfig
    from pipeline.stages.check import check_train

    config = RunConfig.from_yaml(source, overrides or ())
    check_train(config)  # before torch is imported, which takes seconds
    from pipeline.console import RunConsole
    from pipeline.train_run import TrainRun

    screen = RunConsole(quiet=quiet)
    with screen:
        result = TrainRun(config, out, screen.show, anew=anew).run()
    training = result.training
    if training.last_loss is not None:
        screen.line(f"loss: {training.last_loss:.4f} after {training.steps} steps")
    for name, value in training.metrics.items():
        screen.line(f"{name}: {value:.4g}")
    screen.show_files("files", result.folder, result.files)


STARTERS: Final = Path(__file__).with_name("starters")

EXAMPLE: Final = "fuse_attention"
"""The pass whose example model `init onnx-file` writes where there is no model yet."""


class Starter(StrEnum):
    """A configuration to begin with, by the kind of model."""

    VIT = "vit"
    LLM = "llm"
    SEQ2SEQ = "seq2seq"
    SPEECH = "speech"
    VLM = "vlm"
    DIFFUSION = "diffusion"
    PARTS = "parts"
    CNN = "cnn"
    ONNX_FILE = "onnx-file"


def init(kind: Starter, out: Path | None = None) -> None:
    """Write a commented configuration to begin with; it runs as it is, on a small model with random weights."""
    target = out or Path(f"{kind}.yaml")
    _write(target, (STARTERS / f"{kind}.yaml").read_text(encoding="utf-8").replace(f"{kind}.yaml", target.name))
    print_line(f"wrote {target}")
    model = target.with_name("model.onnx")
    if kind is Starter.ONNX_FILE and not model.exists():
        import onnx

        from passes.catalog.listing import example_of, read_example

        picture = example_of(EXAMPLE)
        assert picture is not None
        with write_errors(model):
            onnx.save(read_example(picture).model, model)
        print_line(f"wrote {model}, a small attention to try it on; put your own model in its place")
    print_line(f"next: onnxline run {target}")


def _write(target: Path, text: str) -> None:
    """Write a new file; raises UsageError where it exists already, or its folder cannot be written."""
    with write_errors(target):
        try:
            with target.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise UsageError(f"{target} is there already; name another file with --out") from None
        except FileNotFoundError:
            raise UsageError(f"there is no folder {target.parent}; make it, or name another file with --out") from None


def schema() -> None:
    """Write the JSON Schema of a configuration, for editors."""
    from pipeline.config import json_schema

    print_json(json_schema())
