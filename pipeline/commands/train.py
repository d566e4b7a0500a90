"""`onnxline train CONFIG`: the module of a configuration, trained by recorded steps."""

from __future__ import annotations

from pathlib import Path

import typer

from pipeline.commands.shared import add_command


def register(app: typer.Typer) -> None:
    add_command(app, "train", train)


def train(
    source: str,
    out: Path | None = None,
    overrides: list[str] | None = None,
    anew: bool = False,
    quiet: bool = False,
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
