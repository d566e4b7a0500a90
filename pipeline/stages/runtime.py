"""Stage `runtime`: imports the final model into the IR, plans it, and runs it on every configured backend."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import numpy as np

from passes.errors import StepFailed
from passes.proof.numbers import Errors, compare
from passes.proof.types import Reference, worst_errors
from passes.weights.detached import read_model
from pipeline.config import RunConfig
from pipeline.config.sections import RuntimeConfig
from pipeline.errors import CheckFailed, DataError, Unsupported, UsageError, message_with_notes
from pipeline.events import Observer, Progress
from pipeline.ir.json import to_json
from pipeline.ir.text import to_text
from pipeline.report import BackendReport, ExportReport, RuntimeReport
from pipeline.stages.export import key_of_parameter
from pipeline.stages.plan_files import with_memory_map, write_plan_files
from pipeline.stages.weight_free import written_path
from pipeline.verify.backends import BACKENDS, Backend, OnnxFile, shapes_of
from pipeline.verify.references import References
from pipeline.workspace import Workspace, stamp

__all__ = ["refuse_wrong_results", "remove_ir", "run_backends"]

Judge = Callable[[str, np.ndarray, np.ndarray], Errors]
"""(output name, expected, found) → errors, under the tolerances by which the export was compared."""

TIMED_RUNS: Final = 5
TIMED_S: Final = 1.0
"""Runs for the median in the report, and the seconds after which fewer are enough."""

IR_FILES: Final = ("ir.json", "ir.txt", "plan.json", "plan.bin")


def run_backends(
    config: RunConfig,
    exported: ExportReport,
    references: References,
    workspace: Workspace,
    observer: Observer,
) -> RuntimeReport:
    """Run and compare each backend; for `plan` write the IR and the plan for the first draw's shapes.

    A model that a backend cannot take is reported, and is an error only where `RuntimeConfig.requires` says so.

    Raises:
        CheckFailed: onnxruntime fails, or exceeds its time limit, which follows from weights and inputs.
        UsageError: a backend that is required cannot take the model; `Unsupported` lists what it lacks. Kernels in C++
            were asked for, and cannot be compiled here.
    """
    remove_ir(workspace)
    path = written_path(workspace)
    model = OnnxFile(path, _trainable(path, exported.parameters, config.model.trainable))
    names = config.runtime.chosen
    _build_kernels(config.runtime, observer)
    reports: list[BackendReport] = []
    planned: dict[str, Any] = {}

    def judge(name: str, expected: np.ndarray, got: np.ndarray) -> Errors:
        known = exported.errors.get(name)
        return compare(expected, got, config.verify.compared_within, known and known.judged_as)

    for index, name in enumerate(names):
        observer(Progress("runtime", name, index, len(names)))
        try:
            backend = BACKENDS[name](model, config.runtime.chosen_fusions, native=config.runtime.native)
            planned |= _write_ir(backend, references.draws[0], config.runtime, path, workspace)
            found = _run(name, backend, references.draws, judge)
            counts = {"fallbacks": backend.fallbacks, "segments": backend.segments}
            reports.append(replace(found, **counts, native_calls=backend.native_calls))
        except StepFailed as failure:
            raise CheckFailed(f"the final model does not run on {name}: {failure}") from failure
        except DataError:  # the input values are wrong, not the model
            raise
        except UsageError as refusal:
            if config.runtime.requires(name):
                raise
            if name == "plan":
                remove_ir(workspace)
                planned = {}
            reports.append(_unsupported_report(name, refusal))
    return RuntimeReport(backends=tuple(reports), **planned)


def _build_kernels(config: RuntimeConfig, observer: Observer) -> None:
    """Compile the kernels in C++ before the first backend runs, where they are asked for and not there yet.

    Raises:
        UsageError: this machine has no compiler that can do it.
    """
    if not config.native or "plan" not in config.chosen:
        return
    from pipeline.runtime.kernels import is_library_built, load_library

    if not is_library_built():
        observer(Progress("runtime", "compiling kernels in C++, once", 0, len(config.chosen)))
    load_library()


def _unsupported_report(name: str, refusal: UsageError) -> BackendReport:
    operators = refusal.operators if isinstance(refusal, Unsupported) else ()
    return BackendReport(name, {}, 0.0, "unsupported", message_with_notes(refusal), operators)


def remove_ir(workspace: Workspace) -> None:
    """Remove the IR and the plan of an earlier model, so that they are never beside a new one."""
    for name in IR_FILES:
        (workspace.folder / name).unlink(missing_ok=True)


def refuse_wrong_results(report: RuntimeReport) -> None:
    """Raise CheckFailed when a backend does not compute what the reference did."""
    bad = [
        f"{backend.name}: {name}: {errors.why}"
        for backend in report.backends
        for name, errors in backend.errors.items()
        if not errors.ok
    ]
    if bad:
        raise CheckFailed(f"the final model does not run right: {'; '.join(bad)}")


def _run(name: str, backend: Backend, references: Sequence[Reference], judge: Judge) -> BackendReport:
    errors: list[dict[str, Errors]] = []
    seconds: list[float] = []
    for reference in references:
        outputs = backend.run(reference.feeds)
        seconds = seconds or _time_runs(backend, reference)
        errors.append({output: judge(output, value, outputs[output]) for output, value in reference.outputs.items()})
    return BackendReport(name, worst_errors(errors), statistics.median(seconds))


def _time_runs(backend: Backend, reference: Reference) -> list[float]:
    """Time some runs, after a first one in which a session allocates and chooses kernels."""
    seconds: list[float] = []
    while not seconds or (len(seconds) < TIMED_RUNS and sum(seconds) < TIMED_S):
        begun = time.perf_counter()
        backend.run(reference.feeds)
        seconds.append(time.perf_counter() - begun)
    return seconds


def _write_ir(
    backend: Backend, reference: Reference, config: RuntimeConfig, model: Path, workspace: Workspace
) -> dict[str, Any]:
    """Write the IR and the plan for the shapes of `reference`; return the fields of the report that they fill.

    A model that runs in segments has neither as a whole, nor has a backend that makes no plan.
    """
    whole = backend.compile_whole(shapes_of(reference.feeds))
    if whole is None:
        return {}
    graph, program = whole
    plan = with_memory_map(program.plan, config)
    files = [
        workspace.write_text("ir.json", json.dumps(to_json(graph), indent=1) + "\n"),
        workspace.write_text("ir.txt", to_text(graph)),
        *write_plan_files(plan, graph, model, workspace),
    ]
    return {
        "ops": len(graph.ops),
        "values": len(graph.values),
        "arena_bytes": plan.arena_bytes,
        "packed_bytes": program.packed_bytes,
        "aliases": len(plan.alias),
        "generic_calls": plan.generic_calls(),
        "fallbacks": plan.generic_calls(),
        "files": tuple((file.name, *stamp(file)) for file in files),
    }


def _trainable(path: Path, digests: frozenset[str], globs: Sequence[str]) -> frozenset[str]:
    """Names of the initializers that hold an `nn.Parameter`'s bytes, or that match the user's globs."""
    model = read_model(path)
    return frozenset(
        tensor.name
        for tensor in model.proto.graph.initializer
        if any(fnmatchcase(tensor.name, glob) for glob in globs)
        or (digests and key_of_parameter(tensor, model.digest(tensor)) in digests)
    )
