"""Import the final model into the IR, plan it, and run it on every backend that the configuration names."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from passes.model.weights import read_model
from passes.proof.numbers import Errors, Tolerance, compare
from passes.proof.prove import Reference, worst_errors
from pipeline.config import RunConfig
from pipeline.errors import CheckFailed
from pipeline.events import Observer, Progress
from pipeline.importers import from_onnx
from pipeline.ir.check import check
from pipeline.ir.json import to_json
from pipeline.ir.text import to_text
from pipeline.lowering import EMITTERS
from pipeline.planning import to_json as plan_to_json
from pipeline.report import BackendReport, ExportReport, RuntimeReport
from pipeline.runtime import compile_graph
from pipeline.stages.referred import written_path
from pipeline.stages.tolerances import tolerances_of
from pipeline.verify.references import References
from pipeline.verify.runners import Runner, onnxruntime_runner, plan_runner
from pipeline.workspace import Workspace, stamp

__all__ = ["execute", "refuse_wrong_results", "remove_ir"]

IR_FILES: Final = ("ir.json", "ir.txt", "plan.json")


def execute(
    config: RunConfig,
    exported: ExportReport,
    references: References,
    workspace: Workspace,
    observer: Observer,
) -> RuntimeReport:
    """Write `ir.json`, `ir.txt` and `plan.json` for the first draw's shapes, then run and compare each backend.

    The `torch` backend is the reference itself, so it is not run again.

    Raises:
        Unsupported: `plan` is asked for, and the model has an operator without an importer or an emitter.
    """
    remove_ir(workspace)
    path = written_path(workspace)
    trainable = _trainable(path, exported.parameters, config.model.trainable)
    names = [name for name in config.runtime.backends if name != "torch"]
    facts: dict[str, int] = {}
    files: list[Path] = []
    if "plan" in names:
        observer(Progress("runtime", "import, lower, plan", 0, len(names) + 1))
        facts, files = _write_ir(path, shapes_of(references.draws[0]), trainable, workspace)
    reports = []
    for index, name in enumerate(names, start=1):
        observer(Progress("runtime", name, index, len(names) + 1))
        reports.append(_run(name, path, references.draws, trainable, tolerances_of(config)))
    return RuntimeReport(backends=tuple(reports), files=tuple((file.name, *stamp(file)) for file in files), **facts)


def remove_ir(workspace: Workspace) -> None:
    """The IR and the plan of an earlier model must not stand beside a new one."""
    for name in IR_FILES:
        (workspace.folder / name).unlink(missing_ok=True)


def refuse_wrong_results(report: RuntimeReport) -> None:
    """Raises CheckFailed when a backend does not compute what the reference did."""
    bad = [
        f"{backend.name}: {name}: {errors.why}"
        for backend in report.backends
        for name, errors in backend.errors.items()
        if not errors.ok
    ]
    if bad:
        raise CheckFailed(f"the final model does not run right: {'; '.join(bad)}")


def _run(
    name: str,
    path: Path,
    references: Sequence[Reference],
    trainable: frozenset[str],
    tolerances: Mapping[str, Tolerance],
) -> BackendReport:
    runners: dict[str, Runner] = {}
    found: list[dict[str, Errors]] = []
    seconds: list[float] = []
    for reference in references:
        # A plan is made for one feed signature; onnxruntime takes any size.
        shapes = shapes_of(reference)
        key = str(shapes) if name == "plan" else ""
        if key not in runners:
            runners.clear()
            runners[key] = (
                plan_runner(path, shapes, trainable) if name == "plan" else onnxruntime_runner(read_model(path))
            )
        begun = time.perf_counter()
        outputs = runners[key](reference.feeds)
        seconds.append(time.perf_counter() - begun)
        found.append({one: compare(value, outputs[one], tolerances) for one, value in reference.outputs.items()})
    return BackendReport(name, worst_errors(found), statistics.median(seconds))


def _write_ir(
    path: Path, shapes: Mapping[str, tuple[int, ...]], trainable: frozenset[str], workspace: Workspace
) -> tuple[dict[str, int], list[Path]]:
    graph = from_onnx(path, shapes=shapes, emitters=EMITTERS, trainable=trainable)
    check(graph)
    plan = compile_graph(graph).plan
    files = [
        workspace.write_text("ir.json", json.dumps(to_json(graph), indent=1) + "\n"),
        workspace.write_text("ir.txt", to_text(graph)),
        workspace.write_text("plan.json", json.dumps(plan_to_json(plan), indent=1) + "\n"),
    ]
    facts = {
        "ops": len(graph.ops),
        "values": len(graph.values),
        "arena_bytes": plan.arena_bytes,
        "aliases": len(plan.alias),
    }
    return facts, files


def shapes_of(reference: Reference) -> dict[str, tuple[int, ...]]:
    """An ONNX file may call its dims other names than the configuration does, or none; shapes fit always."""
    return {name: array.shape for name, array in reference.feeds.items()}


def _trainable(path: Path, digests: frozenset[str], globs: Sequence[str]) -> frozenset[str]:
    """Names of the final model's initializers that hold an `nn.Parameter`'s bytes, or that the user's globs match."""
    model = read_model(path)
    return frozenset(
        tensor.name
        for tensor in model.proto.graph.initializer
        if any(fnmatchcase(tensor.name, glob) for glob in globs) or (digests and model.digest(tensor) in digests)
    )
