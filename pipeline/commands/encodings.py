"""`onnxline encodings MODEL -o OUT`: the encodings of a quantized model as a file of AIMET's, and the way back."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer

from passes.suggest import plural
from pipeline.commands.shared import add_command, check_output
from pipeline.errors import UsageError
from pipeline.terminal import print_line


def register(app: typer.Typer) -> None:
    add_command(app, "encodings", encodings)


def encodings(
    model: Path,
    out: Path,
    apply: Path | None = None,
    of: Path | None = None,
    version: Literal["0.6.1", "1.0.0", "2.0.0", "2.1.0"] = "2.0.0",
) -> None:
    """Read the encodings of a quantized model into a file of AIMET's, or quantize a model by such a file."""
    from passes.encodings.aimet import aimet_text, read_aimet
    from passes.encodings.fit import fit_encodings
    from passes.encodings.from_qdq import read_qdq
    from passes.weights.detached import read_model
    from passes.weights.files import save, write_errors

    if apply is not None:
        from pipeline.quantsim.qdq import insert_qdq

        if of is not None:
            raise UsageError("encodings: found --of with --apply, where MODEL is the float model itself; leave it out")
        check_output(out, model)
        source = read_model(model)
        given = fit_encodings(read_aimet(apply)[0], source)
        with write_errors(out):
            save(insert_qdq(source, given), out)
    else:
        quantized = read_model(model)
        given = read_qdq(quantized)
        source = quantized if of is None else read_model(of)
        given = given if of is None else fit_encodings(given, source)
        constants = {name for name, encoding in given.items() if encoding.axis is not None}
        constants |= {tensor.name for tensor in source.proto.graph.initializer}
        constants |= {name for name in given if f"{name}_quantized" in constants}
        with write_errors(out):
            out.write_text(aimet_text(given, constants, version), encoding="utf-8")
    print_line(f"{out}: {plural(len(given), 'encoding')}")
