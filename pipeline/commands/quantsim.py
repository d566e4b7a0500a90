"""Quantization on the command line.

`onnxline quantsim CONFIG|MODEL` quantizes the final model for a simulation, and says what that costs. `onnxline
encodings MODEL -o OUT` writes the encodings of a quantized model as a file of AIMET's, or goes the other way.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import typer

from passes.suggest import bytes_text, plural
from passes.visible import table_lines
from pipeline.commands.shared import add_command, check_output, wishes_of
from pipeline.errors import CheckFailed, UsageError
from pipeline.terminal import print_json, print_line, print_text

if TYPE_CHECKING:
    from passes.encodings.aimet import AimetVersion
    from pipeline.quantsim import QuantSimResult
    from pipeline.quantsim.best import Best
    from pipeline.quantsim.report import QuantSimReport


WORST = 12
"""How many rows the table shows without `--verbose`."""

BUDGET = "20m"
"""The time of the trials of `--best`."""


def register(app: typer.Typer) -> None:
    add_command(app, "quantsim", quantsim)
    add_command(app, "encodings", encodings)


COLLECTED: Final = (20_000, 20)
"""Thresholds of Python's collector: a cycle of a simulation may hold large arrays, and what imports made stays."""


def quantsim(
    source: str,
    out: Path | None = None,
    keep: list[str] | None = None,
    skip: list[str] | None = None,
    recipe: list[str] | None = None,
    overrides: list[str] | None = None,
    verbose: bool = False,
    quiet: bool = False,
    as_json: bool = False,
    best: Literal["4bit"] | None = None,
    budget: str | None = None,
) -> None:
    """Prepare the model, quantize it by rules, and say what each step costs."""
    if budget is not None and best is None:
        raise UsageError(f"--budget: found {budget!r} without --best, expected --best 4bit, whose trials it limits")
    from pipeline.config import RunConfig

    config = RunConfig.from_source(source, overrides or (), wishes_of(recipe, keep, skip))
    from pipeline.console import PAGE, RunConsole
    from pipeline.quantsim import QuantSim
    from pipeline.quantsim.parts import PartsQuantSimResult
    from pipeline.quantsim.report import report_text

    gc.freeze()  # the first walk would go through all that was imported: 0.05 s
    gc.set_threshold(*COLLECTED)
    screen = RunConsole(verbose=verbose, quiet=quiet or as_json, keep=config.passes.keep)
    found: Best | None = None
    with screen:
        if best is None:
            result = QuantSim(config, out, screen.show, progress=False).run()
        else:
            from pipeline.quantsim.best import find_best, seconds_of

            found = find_best(config, seconds_of(budget or BUDGET), out, screen.show)
            result = found.result
    parts = result.parts if isinstance(result, PartsQuantSimResult) else {}
    if as_json and isinstance(result, PartsQuantSimResult):
        texts = {name: json.loads(report_text(part.report)) for name, part in parts.items()}
        print_json({"parts": texts, **result.to_json()})
        _check_bounds(result)
        return
    if as_json:
        print_text(report_text(result.report))
        _check_bounds(result)
        return
    screen.show_passes()
    has_chain = isinstance(result, PartsQuantSimResult) and result.chain is not None
    for name, part in (parts or {"": result}).items():
        for line in (*([f"part {name}"] if name else []), *_lines(part, verbose, shows_layers=not has_chain)):
            screen.line(line)
    for line in result.chain_lines(None if verbose else WORST) if isinstance(result, PartsQuantSimResult) else ():
        screen.line(line)
    for line in found.lines() if found else ():
        screen.line(line)
    screen.show_files("files", result.folder, (*result.files, PAGE, *((found.config.name,) if found else ())))
    _check_bounds(result)


def _check_bounds(result: QuantSimResult) -> None:
    """Refuse a model, a chain or a part that is worse for its task than `quantsim.metric.bound`.

    Raises:
        CheckFailed: it is.
    """
    from pipeline.quantsim.parts import PartsQuantSimResult

    found = {"quantsim.metric": result.report.metric}
    if isinstance(result, PartsQuantSimResult):
        found = {f"parts.{name}.quantsim.metric": part.report.metric for name, part in result.parts.items()}
        found["quantsim.metric"] = result.metric
    for key, metric in found.items():
        if metric is not None and not metric.passes:
            raise CheckFailed(f"{key}: {metric}")


def _lines(result: QuantSimResult, verbose: bool, *, shows_layers: bool) -> Iterator[str]:
    """What a simulation found; of a part, the layers stand in the table of the chain, if there is one."""
    from pipeline.quantsim.noise import describe_ratio
    from pipeline.quantsim.suggest import suggestion_text

    report, most = result.report, None if verbose else WORST
    for rule in report.rules:
        counts = f"{plural(rule.weights, 'weight')}, {plural(rule.activations, 'other')}"
        yield f"rule {rule.selector} ({rule.formats}): {counts}; in force for {rule.in_force}"
    yield from report.notes
    for step in report.optimized:
        yield str(step)
        for row in step.layers if verbose else ():
            what = "" if step.kind == "prepare" else ", taken" if row.taken else ", not taken"
            ratios = f"{describe_ratio(row.before_db)} → {describe_ratio(row.after_db)}"
            yield f"  {row.layer} ({row.weight}): {ratios}{what}"
    if not report.not_measured:
        yield from _worst(report, most)
        yield from _layers(report, most) if shows_layers else ()
    shown = report.left_in_float[:most]
    for tensor in shown:
        yield f"in float: {tensor.tensor}: {tensor.reason}"
    if len(shown) < len(report.left_in_float):
        yield f"in float: {plural(len(report.left_in_float) - len(shown), 'more tensor')} (--verbose shows all)"
    for name, noise in report.outputs.items():
        device = report.device_like.outputs.get(name) if report.device_like else None
        optimized = f"; with onnxruntime's optimizations {describe_ratio(device.sqnr_db)}" if device else ""
        yield f"output {name}: {describe_ratio(noise.sqnr_db)}, max abs error {noise.max_abs:.2e}{optimized}"
    if report.metric:
        yield str(report.metric)
    if report.device_like:
        yield from report.device_like.notes()
    if report.suggestion:
        yield from suggestion_text(report.suggestion).splitlines()
    before, after = bytes_text(report.weight_bytes), bytes_text(report.quantized_weight_bytes)
    yield f"weights: {before} → {after}; {report.quantized_tensors} of {report.tensors} tensors quantized"


def _worst(report: QuantSimReport, most: int | None) -> Iterator[str]:
    from pipeline.quantsim.noise import describe_ratio

    rows = report.rows[:most]
    cells = (
        (row.tensor, row.part or row.op, row.precision, describe_ratio(row.local_db), describe_ratio(row.total_db))
        for row in rows
    )
    yield from table_lines([("tensor", "part", "format", "alone", "in all"), *cells])
    if len(rows) < len(report.rows):
        yield f"{plural(len(report.rows) - len(rows), 'tensor')} with less noise (--verbose shows all)"


def _layers(report: QuantSimReport, most: int | None) -> Iterator[str]:
    """What each layer alone does to the outputs."""
    from pipeline.quantsim.report import LAYER_TITLES, layer_cells, layer_lines

    rows = [layer_cells(row.layer, row.part or row.op, row.module, row.sqnr_db, row.share) for row in report.layers]
    yield from layer_lines(LAYER_TITLES, rows, most)


def encodings(
    model: Path,
    out: Path,
    apply: Path | None = None,
    of: Path | None = None,
    version: Literal["0.6.1", "1.0.0", "2.0.0", "2.1.0"] | None = None,
    kind: Literal["aimet", "tensorrt", "ai-edge", "gptq", "gptq_v2", "awq"] = "aimet",
) -> None:
    """Read the encodings of a quantized model into a file for another tool, or quantize a model by such a file.

    Files of AIMET, GPTQ and AWQ go both ways; those of TensorRT and ai-edge-quantizer are written alone, and those of
    GGUF read alone."""
    _refuse_unread_options(apply, of, version, kind)
    if apply is not None:
        _quantize_by_file(model, out, apply)
    elif kind in CHECKPOINTS:
        from passes.rewrites.nibble_files import write_nibbles
        from passes.weights.detached import read_model

        count = write_nibbles(read_model(model), out, kind)
        print_line(f"{out}: {plural(count, 'weight')} of 4 bits")
    else:
        _write_encodings_file(model, out, of, version or "2.0.0", kind)


CHECKPOINTS: Final = ("gptq", "gptq_v2", "awq")
"""The tools whose file is a checkpoint with the quantized weights."""


def _refuse_unread_options(apply: Path | None, of: Path | None, version: str | None, kind: str) -> None:
    """Refuse options of `encodings` that would have no effect together.

    Raises:
        UsageError: naming the options.
    """
    if kind != "aimet" and apply is not None:
        raise UsageError(f"encodings: found --to {kind} with --apply, which writes a model; leave one of them out")
    if of is not None and apply is not None:
        raise UsageError("encodings: found --of with --apply, where MODEL is the float model itself; leave it out")
    if of is not None and kind in CHECKPOINTS:
        raise UsageError(f"encodings: found --of with --to {kind}, which takes the names of MODEL; leave it out")
    if version is not None and (apply is not None or kind != "aimet"):
        other = "--apply" if apply is not None else f"--to {kind}"
        raise UsageError(f"encodings: found --version with {other}, which writes no file of AIMET's; leave it out")
    if kind == "ai-edge" and of is None:
        raise UsageError("encodings: --to ai-edge names operators of the float model; name it with --of FLOAT.onnx")


def _quantize_by_file(model: Path, out: Path, apply: Path) -> None:
    """Quantize the float model by a file: AIMET's encodings, or the weights of GGUF, GPTQ or AWQ."""
    from passes.encodings.aimet import read_aimet
    from passes.encodings.encoding import fit_encodings
    from passes.rewrites.take_weights import READERS, read_weight_file
    from passes.weights.detached import read_model
    from passes.weights.files import save, write_errors
    from pipeline.quantsim.qdq import insert_qdq

    check_output(out, model)
    source = read_model(model)
    if apply.suffix in READERS:
        found = read_weight_file(source, apply)
        made, summary = found.store(source), found.summary
    else:
        known = fit_encodings(read_aimet(apply)[0], source)
        made, summary = insert_qdq(source, known), plural(len(known), "encoding")
    with write_errors(out):
        save(made, out)
    print_line(f"{out}: {summary}")


def _write_encodings_file(model: Path, out: Path, of: Path | None, version: AimetVersion, kind: str) -> None:
    """Write the encodings of a quantized model for AIMET, TensorRT or ai-edge-quantizer."""
    from passes.encodings.aimet import aimet_text, from_aimet
    from passes.encodings.encoding import find_axes, fit_encodings, stored_shapes
    from passes.encodings.from_qdq import read_qdq, read_weight_axes
    from passes.encodings.tool_files import to_ai_edge_recipe, to_tensorrt_cache
    from passes.weights.detached import read_model
    from passes.weights.files import write_file

    quantized = read_model(model)
    source = quantized if of is None else read_model(of)
    known = read_qdq(quantized) if of is None else fit_encodings(read_qdq(quantized), source)
    constants = {name for name, encoding in known.items() if encoding.axis is not None}
    constants |= source.index.initializers.keys()
    constants |= {name for name in known if f"{name}_quantized" in constants}
    if kind == "tensorrt":
        text = to_tensorrt_cache(known, constants)
        summary = plural(text.count("\n") - 1, "scale")  # the first line is a title
    elif kind == "ai-edge":
        text = to_ai_edge_recipe(known, source)
        summary = plural(len(json.loads(text)), "rule")
    else:
        axes = read_weight_axes(source) if of is None else find_axes(source, stored_shapes(source))
        text = aimet_text(known, constants, version, axes)
        summary = plural(len(from_aimet(json.loads(text))), "encoding")
    write_file(out, text)
    print_line(f"{out}: {summary}")


def check_encodings_of(source: str, target: str | None, path: Path, *, is_alone: bool) -> None:
    """Print what the converter of `target` would calibrate, not find or misread with the encodings of `path`.

    Raises:
        UsageError: no target or no ONNX file is given, or other options than these.
        Exit: with code 1, where there is anything.
    """
    from passes.weights.detached import read_model
    from pipeline.config import QuantSimConfig
    from pipeline.quantsim.encodings_check import check_encodings

    if target is None or not is_alone or Path(source).suffix != ".onnx":
        raise UsageError(
            "--encodings holds a file against MODEL.onnx for a target; give --target NAME, and no other option"
        )
    try:
        QuantSimConfig.model_validate({"profile": target})
    except ValueError as error:
        raise UsageError(
            f"--encodings: found --target {target}, expected a profile that places encodings, such as qnn-htp"
        ) from error
    report = check_encodings(read_model(Path(source)), path, target)
    for line in report.lines():
        print_line(line)
    if not report.is_complete:
        raise typer.Exit(1)
    print_line(f"{path}: {plural(report.entries, 'encoding')}, complete for {source} on {target}")
