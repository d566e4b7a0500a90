"""Import the final model into the IR, plan it, and run it on every backend that the configuration names."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import numpy as np

from passes.errors import StepFailed
from passes.proof.numbers import Errors, compare
from passes.proof.types import Reference, worst_errors
from passes.weights.detached import read_model
from pipeline.config import RunConfig
from pipeline.errors import CheckFailed, Unsupported, UsageError, message_with_notes
from pipeline.events import Observer, Progress
from pipeline.importers import from_onnx
from pipeline.ir.check import check
from pipeline.ir.json import to_json
from pipeline.ir.text import to_text
from pipeline.lowering import EMITTERS
from pipeline.planning import to_json as plan_to_json
from pipeline.report import BackendReport, ExportReport, RuntimeReport
from pipeline.runtime import compile_graph
from pipeline.runtime.blame import DataError
from pipeline.stages.export import key_of_parameter
from pipeline.stages.referred import written_path
from pipeline.stages.tolerances import tolerances_of
from pipeline.verify.references import References
from pipeline.verify.runners import Runner, onnxruntime_runner, plan_runner
from pipeline.workspace import Workspace, stamp

__all__ = ["execute", "refuse_wrong_results", "remove_ir"]

Judge = Callable[[str, np.ndarray, np.ndarray], Errors]
"""Compares the output of a name with what was expected of it, as the exported model was compared."""

TIMED_RUNS: Final = 5
TIMED_S: Final = 1.0
"""Runs of which the report gives the median, and the seconds after which fewer are enough."""

IR_FILES: Final = ("ir.json", "ir.txt", "plan.json")


def execute(
    config: RunConfig,
    exported: ExportReport,
    references: References,
    workspace: Workspace,
    observer: Observer,
) -> RuntimeReport:
    """Write `ir.json`, `ir.txt` and `plan.json` for the first draw's shapes, then run and compare each backend.

    The `torch` backend is the reference itself, so it is not run again. A model that `plan` cannot take is reported,
    and is an error only where the configuration names `plan`.

    Raises:
        CheckFailed: onnxruntime stops, or takes longer than weights and inputs explain.
        UsageError: the configuration names `plan`, which cannot take the model; `Unsupported` lists what it lacks.
    """
    remove_ir(workspace)
    path = written_path(workspace)
    trainable = _trainable(path, exported.parameters, config.model.trainable)
    names = [name for name in config.runtime.chosen if name != "torch"]
    reports = []
    planned: dict[str, Any] = {}
    tolerances = tolerances_of(config)

    def judge(name: str, expected: np.ndarray, got: np.ndarray) -> Errors:
        known = exported.errors.get(name)
        return compare(expected, got, tolerances, known and known.judged_as)

    for index, name in enumerate(names):
        observer(Progress("runtime", name, index, len(names)))
        if name == "plan":
            report, planned = _run_plan(
                path, references.draws, trainable, workspace, judge, needed=config.runtime.needs_plan
            )
        else:
            try:
                report = _run(name, path, references.draws, trainable, judge)
            except StepFailed as failure:
                raise CheckFailed(f"the final model does not run on {name}: {failure}") from failure
        reports.append(report)
    return RuntimeReport(backends=tuple(reports), **planned)


def _run_plan(
    path: Path,
    references: Sequence[Reference],
    trainable: frozenset[str],
    workspace: Workspace,
    judge: Judge,
    *,
    needed: bool,
) -> tuple[BackendReport, dict[str, Any]]:
    """Write the IR and the plan, run it, and say what of the report they fill; or say why there is no plan."""
    try:
        planned = _write_ir(path, shapes_of(references[0]), trainable, workspace)
        return _run("plan", path, references, trainable, judge), planned
    except DataError:  # a fault of the feed, and none of what `plan` can take
        raise
    except UsageError as refusal:
        if needed:
            raise
        remove_ir(workspace)
        return _unsupported("plan", refusal), {}


def _unsupported(name: str, refusal: UsageError) -> BackendReport:
    operators = refusal.operators if isinstance(refusal, Unsupported) else ()
    return BackendReport(name, {}, 0.0, "unsupported", message_with_notes(refusal), operators)


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
    judge: Judge,
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
        outputs = runners[key](reference.feeds)
        seconds = seconds or _time_runs(runners[key], reference)
        found.append({one: judge(one, value, outputs[one]) for one, value in reference.outputs.items()})
    return BackendReport(name, worst_errors(found), statistics.median(seconds))


def _time_runs(run: Runner, reference: Reference) -> list[float]:
    """Seconds of some runs after a first one, in which a session allocates and chooses kernels."""
    seconds: list[float] = []
    while not seconds or (len(seconds) < TIMED_RUNS and sum(seconds) < TIMED_S):
        begun = time.perf_counter()
        run(reference.feeds)
        seconds.append(time.perf_counter() - begun)
    return seconds


def _write_ir(
    path: Path, shapes: Mapping[str, tuple[int, ...]], trainable: frozenset[str], workspace: Workspace
) -> dict[str, Any]:
    graph = from_onnx(path, shapes=shapes, emitters=EMITTERS, trainable=trainable)
    check(graph)
    plan = compile_graph(graph).plan
    files = [
        workspace.write_text("ir.json", json.dumps(to_json(graph), indent=1) + "\n"),
        workspace.write_text("ir.txt", to_text(graph)),
        workspace.write_text("plan.json", json.dumps(plan_to_json(plan), indent=1) + "\n"),
    ]
    return {
        "ops": len(graph.ops),
        "values": len(graph.values),
        "arena_bytes": plan.arena_bytes,
        "aliases": len(plan.alias),
        "files": tuple((file.name, *stamp(file)) for file in files),
    }


def shapes_of(reference: Reference) -> dict[str, tuple[int, ...]]:
    """An ONNX file may call its dims other names than the configuration does, or none; shapes fit always."""
    return {name: array.shape for name, array in reference.feeds.items()}


def _trainable(path: Path, digests: frozenset[str], globs: Sequence[str]) -> frozenset[str]:
    """Names of the final model's initializers that hold an `nn.Parameter`'s bytes, or that the user's globs match."""
    model = read_model(path)
    return frozenset(
        tensor.name
        for tensor in model.proto.graph.initializer
        if any(fnmatchcase(tensor.name, glob) for glob in globs)
        or (digests and key_of_parameter(tensor, model.digest(tensor)) in digests)
    )
