"""`onnxline to-int8`: quantize an ONNX model by the rules of a target, and say how far its outputs move."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Literal

import typer

from passes.suggest import describe_absence
from pipeline.commands.shared import add_command, check_output, split_names
from pipeline.errors import UsageError
from pipeline.terminal import open_screen


def register(app: typer.Typer) -> None:
    add_command(app, "to-int8", to_int8)


def to_int8(
    model: Path,
    out: Path,
    data: list[str] | None = None,
    samples: int = 32,
    profile: Literal["ort-cpu", "qnn-htp", "qnn-htp-w4a16", "tensorrt", "weight-only"] = "ort-cpu",
    keep: list[str] | None = None,
    encodings: Path | None = None,
    seed: int = 0,
    timeout_s: float = 600.0,
    quiet: bool = False,
) -> None:
    """Compute in 8 bits where the rules of a target say so, with ranges by samples."""
    if not model.is_file():
        raise UsageError(f"{model}: {describe_absence(model)}; expected an ONNX file")
    check_output(out, model)
    from pipeline.quantsim.int8 import to_int8 as quantize

    gc.freeze()  # as for quantsim: what was imported stays
    result = quantize(
        *(model, data or ()),
        samples=samples,
        profile=profile,
        keep=split_names("--keep", keep),
        encodings=encodings,
        seed=seed,
        timeout_s=timeout_s,
    )
    result.save(out)
    screen = open_screen(quiet=quiet)
    for line in str(result).splitlines():
        screen.print_line(line)
    screen.print_line(f"model: {out}")
    screen.print_line(f"the noise of each tensor and layer, on a page: onnxline quantsim {model}")
