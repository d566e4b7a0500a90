"""`onnxline optimize IN.onnx -o OUT.onnx`: the passes with their proof, on an ONNX file alone. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from passes.suggest import bytes_text, describe_absence, milliseconds_text, plural
from pipeline.commands.shared import add_command, check_output, split_names
from pipeline.errors import CheckFailed, UsageError

if TYPE_CHECKING:
    from passes import PassRun
    from passes.context import PassContext
    from passes.encodings.aimet import AimetVersion
    from passes.encodings.encoding import Encoding
    from passes.recipe.recipe import RecipeItem

MOST_LINES = 12
"""How many encodings that were not carried are listed without `--verbose`."""


def register(app: typer.Typer) -> None:
    add_command(app, "optimize", optimize)


def optimize(
    model: Path,
    out: Path,
    keep: list[str] | None = None,
    skip: list[str] | None = None,
    recipe: list[str] | None = None,
    strict: bool = False,
    proof: Literal["numbers", "structure"] = "numbers",
    encodings: Path | None = None,
    without_metadata: bool = False,
    latency: bool = True,
    timeout_s: float = 600.0,
    verbose: bool = False,
    quiet: bool = False,
) -> None:
    """Run the passes on an ONNX file, prove each change, and write the result; works without torch."""
    import passes
    from passes.context import open_context
    from passes.provenance.annotations import strip_metadata
    from passes.recipe import DEFAULT_RECIPE
    from passes.weights.files import save, write_errors
    from pipeline.console import RunConsole
    from pipeline.events import PassEnded, PassesEnded, Progress, StageStarted

    if not model.is_file():
        raise UsageError(f"{model}: {describe_absence(model)}; expected an ONNX file")
    check_output(out, model)
    given, version = read_encodings(encodings)
    encodings_out = out.with_suffix(".encodings")
    if encodings is not None and encodings_out.exists() and encodings_out.samefile(encodings):
        raise UsageError(f"--encodings {encodings} is where the result's are written; name OUT.onnx otherwise")
    steps = DEFAULT_RECIPE if recipe is None else _read_recipe(recipe)
    screen = RunConsole(verbose=verbose, quiet=quiet, keep=split_names("--keep", keep))

    def observe(name: str, index: int, total: int, row: passes.PassRow | None) -> None:
        screen.show(Progress("passes", name, index, total) if row is None else PassEnded(row))

    with screen, open_context(timeout_s) as context:
        screen.show(StageStarted("passes"))
        run = passes.optimize(
            model,
            steps,
            split_names("--skip", skip),
            split_names("--keep", keep),
            proof=proof,
            timeout_s=timeout_s,
            encodings=given,
            context=context,
            observer=observe,
        )
        if run.invalid:
            raise CheckFailed(f"the result is not valid ONNX, so it was not written: {run.invalid}")
        final = strip_metadata(run.model) if without_metadata else run.model
        with write_errors(out):
            save(final, out, referring=bool(run.model.unread()))
        times = _describe_latency(run, model, out, context) if latency and run.example and not quiet else ""
    screen.show(PassesEnded(run.rows, run.structures))
    screen.show_passes()
    for line in (*_describe_result(run, model, out, run.describe_merges(keep or (), steps)), times):
        if line:
            screen.line(line)
    if run.encodings is not None and version is not None:
        write_encodings(run, out, version, screen.line, verbose=verbose)
    if strict and run.reverted:
        were = "was" if len(run.reverted) == 1 else "were"
        raise CheckFailed(f"--strict: {plural(len(run.reverted), 'step')} {were} reverted or failed, as shown above")


def _describe_result(run: PassRun, before: Path, after: Path, merges: Iterable[str]) -> Iterator[str]:
    """The lines on the model that was written: notes, nodes, operators and bytes."""
    nodes, sizes = len(run.model.proto.graph.node), [bytes_text(_bytes_of(path)) for path in (before, after)]
    yield from (f"note: {line}" for line in merges)
    yield f"model: {after}, {plural(nodes, 'node')}"
    yield from (f"note: {remark}" for remark in run.remarks)
    yield f"operators: {run.nodes_before:,} → {nodes:,}; bytes: {sizes[0]} → {sizes[1]}"


def _read_recipe(texts: list[str]) -> tuple[RecipeItem, ...]:
    from pipeline.config import read_recipe  # the classes of a configuration take a tenth of a second to make

    return read_recipe(texts)


def read_encodings(path: Path | None) -> tuple[Mapping[str, Encoding] | None, AimetVersion | None]:
    """What `--encodings` names, and its version; None where it is not given."""
    if path is None:
        return None, None
    from passes.encodings.aimet import read_aimet

    return read_aimet(path)


def write_encodings(
    run: PassRun, out: Path, version: AimetVersion, show: Callable[[str], object], *, verbose: bool = False
) -> None:
    """Write the encodings of the result next to it, and say what became of those of the source."""
    from passes.encodings.aimet import aimet_text_of
    from passes.encodings.carry import describe_carried, summarize_carried
    from passes.weights.files import write_file

    assert run.encodings is not None
    path = out.with_suffix(".encodings")
    write_file(path, aimet_text_of(run.model, run.encodings.encodings, version))
    show(f"{summarize_carried(run.encodings)}: {path}")
    lines = list(describe_carried(run.encodings))
    for line in lines if verbose else lines[:MOST_LINES]:
        show(line)
    if len(lines) > MOST_LINES and not verbose:
        show(f"{len(lines) - MOST_LINES} more (--verbose shows all)")


def _describe_latency(run: PassRun, before: Path, after: Path, context: PassContext) -> str:
    """One line with the time of a run of either file."""
    from passes.errors import StepFailed
    from passes.run.result import HOW_MEASURED, measure_latency
    from passes.weights.split_run import names_computed_in_numpy

    if custom := [*dict.fromkeys(names_computed_in_numpy(run.model.proto))]:
        return f"latency: not measured: onnxruntime cannot run {', '.join(custom)}, whose reference is in numpy"
    try:
        times = [milliseconds_text(measure_latency(str(path), run.example, context)) for path in (before, after)]
    except StepFailed as failure:
        return f"latency: not measured: {' '.join(str(failure).split())}"
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in run.example.items())
    return f"latency: {times[0]} → {times[1]} a run ({HOW_MEASURED}, on {shapes}; --no-latency leaves it out)"


def _bytes_of(path: Path) -> int:
    """Bytes of an ONNX file and of the files with its weights."""
    from passes.weights.files import files_of_model

    return sum(file.stat().st_size for file in files_of_model(path) if file.is_file())
