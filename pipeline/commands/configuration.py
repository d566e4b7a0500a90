"""`onnxline init KIND`: a configuration to begin with. `onnxline schema`: the JSON Schema of one, for editors."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Final

import typer

from passes.weights.files import write_errors
from pipeline.commands.shared import add_command
from pipeline.errors import UsageError
from pipeline.terminal import print_json, print_line

STARTERS: Final = Path(__file__).with_name("starters")

EXAMPLE: Final = "fuse_attention"
"""The pass whose example model `init onnx-file` writes where there is no model yet."""


class Starter(StrEnum):
    """A configuration to begin with, by the kind of model."""

    VIT = "vit"
    LLM = "llm"
    CNN = "cnn"
    ONNX_FILE = "onnx-file"


def register(app: typer.Typer) -> None:
    add_command(app, "init", init)
    add_command(app, "schema", schema)


def init(
    kind: Starter,
    out: Path | None = None,
) -> None:
    """Write a commented configuration to begin with; it runs as it is, on a small model with random weights."""
    target = out or Path(f"{kind}.yaml")
    _write(target, (STARTERS / f"{kind}.yaml").read_text(encoding="utf-8").replace(f"{kind}.yaml", target.name))
    print_line(f"wrote {target}")
    model = target.with_name("model.onnx")
    if kind is Starter.ONNX_FILE and not model.exists():
        import onnx

        from passes.catalog.demo import example_of, read_example

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
