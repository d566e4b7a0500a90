"""Stage `runtime`: imports the final model into the IR, plans it, and runs it on every configured backend.

The graph and the plan become files (plan_files.py).
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from passes.errors import OnnxlineError, StepFailed
from passes.proof.numbers import Errors, compare
from passes.proof.prover import Reference, worst_errors
from passes.suggest import is_named, plural
from passes.weights.detached import read_model
from passes.weights.sessions import lacks_kernel
from pipeline.config import RunConfig
from pipeline.config.sections import RuntimeConfig
from pipeline.errors import CheckFailed, DataError, Unsupported, UsageError, message_with_notes
from pipeline.events import Note, Observer, Progress
from pipeline.report import BackendReport, ExportReport, RuntimeReport
from pipeline.stages.export import key_of_parameter
from pipeline.stages.source import written_path
from pipeline.verify.backends import BACKENDS, Backend, Feeds, OnnxFile, Shapes, shapes_of
from pipeline.verify.exact import excuse_rounding
from pipeline.verify.references import References
from pipeline.workspace import Workspace, stamp

Judge = Callable[[str, np.ndarray, np.ndarray], Errors]
"""(output name, expected, found) → errors, under the tolerances by which the export was compared."""

TIMED_RUNS: Final = 5
TIMED_S: Final = 0.5
"""Runs for the median in the report, and the seconds after which fewer are enough."""

IR_FILES: Final = ("ir.json", "ir.txt", "plan.json", "plan.bin")


def run_backends(
    config: RunConfig, exported: ExportReport, references: References, workspace: Workspace, observer: Observer
) -> RuntimeReport:
    """Run and compare each backend; for `plan` write the IR and the plan for the shapes of the first draw that it runs.

    A backend that nobody named never ends the run: what it cannot take, fails at or computes otherwise is reported.

    Raises:
        CheckFailed: a backend fails, or onnxruntime exceeds its time limit, which follows from weights and inputs.
        UsageError: a backend that is required cannot take the model; `Unsupported` lists what it lacks. Kernels in C++
            were asked for, and cannot be compiled here.
    """
    remove_ir(workspace)
    path = written_path(workspace)
    model = OnnxFile(path, find_trainable(path, exported.parameters, config.model.trainable))
    names = config.runtime.chosen
    _build_kernels(config.runtime, observer)
    reports: list[BackendReport] = []
    planned: dict[str, Any] = {}

    def judge(name: str, expected: np.ndarray, got: np.ndarray) -> Errors:
        known = exported.errors.get(name)
        return compare(expected, got, config.verify.compared_within, known and known.judged_as)

    for index, name in enumerate(names):
        observer(Progress("runtime", name, index, len(names)))
        backend = BACKENDS[name](model, config.runtime.chosen_fusions, **config.runtime.program_options)
        trial = _BackendTrial(backend, name, config.runtime, model)
        for reference in references.draws:
            trial.run(reference, judge, partial(_write_ir, backend, reference, config.runtime, path, workspace))
        trial.complete_times()
        if name == "plan" and not trial.planned:
            remove_ir(workspace)
        planned |= trial.planned
        if name != "onnxruntime" and (worst := trial.worst_draw(references.draws)) is not None:
            trial.difference = _describe_first_difference(backend, model, worst.feeds, config)
        reports.append(trial.report())
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


def remove_ir(workspace: Workspace) -> None:
    """Remove the IR and the plan of an earlier model, so that they are never next to a new one."""
    for name in IR_FILES:
        (workspace.folder / name).unlink(missing_ok=True)


def refuse_wrong_results(report: RuntimeReport) -> None:
    """Raise CheckFailed when a backend that somebody named, or onnxruntime, does not compute what the reference did."""
    bad = [f"{backend.name}: {backend.reason}" for backend in report.backends if backend.is_wrong]
    if bad:
        raise CheckFailed(f"the final model does not run right: {'; '.join(bad)}")


class _BackendTrial:
    """One backend on the draws, one after the other."""

    def __init__(self, backend: Backend, name: str, config: RuntimeConfig, model: OnnxFile) -> None:
        self._backend, self._name, self._config, self._model = backend, name, config, model
        self.errors: dict[str, dict[str, Errors]] = {}
        """By the label of each draw that the backend has run, and by output."""
        self.planned: dict[str, Any] = {}
        """The fields of the report on the plan of the first draw that the backend has run."""
        self.difference = ""
        """Where the values of the backend begin to differ from those of onnxruntime."""
        self._excused: list[str] = []
        """Differences that are rounding of both results."""
        self._refusals: dict[str, Exception] = {}
        self._seconds: list[float] = []
        """Of runs at the sizes of the first draw, after one in which a session allocates and chooses kernels."""
        self._first: Feeds | None = None
        """The first inputs on which the backend has run."""
        self._is_timed = False
        """Whether all draws since have the sizes of the first: at other sizes `plan` compiles the model again."""

    def run(self, reference: Reference, judge: Judge, write_ir: Callable[[], dict[str, Any]]) -> None:
        """Run one draw, with its IR and plan written first where there are none."""
        planned = self.planned
        try:
            planned = planned or write_ir()
            outputs = self._run_draw(reference.feeds)
        except Exception as error:
            self._raise_if_required(error)
            self._refusals[reference.label] = error
            return
        self.planned = planned
        errors = {output: judge(output, value, outputs[output]) for output, value in reference.outputs.items()}
        if self._name != "onnxruntime":
            errors, excused = excuse_rounding(self._model, reference.feeds, reference.outputs, outputs, errors)
            self._excused += excused
        self.errors[reference.label] = errors

    def _run_draw(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """Run a draw, and time it if the draw before it was of the same sizes."""
        if self._first is not None and shapes_of(feeds) != shapes_of(self._first):
            self.complete_times()
        begun = time.perf_counter()
        outputs = self._backend.run(feeds)
        if self._is_timed:
            self._seconds.append(time.perf_counter() - begun)
        if self._first is None:
            self._first, self._is_timed = feeds, True
        return outputs

    def complete_times(self) -> None:
        """Run the first draw again until there are enough times for a median; no run after it is timed."""
        with contextlib.suppress(Exception):  # the draws judge the backend, and this one has run
            while self._is_timed and (
                not self._seconds or (len(self._seconds) < TIMED_RUNS and sum(self._seconds) < TIMED_S)
            ):
                begun = time.perf_counter()
                self._backend.run(self._first or {})
                self._seconds.append(time.perf_counter() - begun)
        self._is_timed = False

    def _raise_if_required(self, error: Exception) -> None:
        """Raise `error`, unless it is only reported: all of a default backend's, and what torch cannot take."""
        if self._config.is_default(self._name) or (self._config.backends is None and lacks_kernel(error)):
            return
        if isinstance(error, StepFailed):
            raise CheckFailed(f"the final model does not run on {self._name}: {error}") from error
        is_refused = isinstance(error, UsageError) and not isinstance(error, DataError)  # the model, not the inputs
        if self._config.requires(self._name) or not is_refused:
            raise error

    def worst_draw(self, draws: Sequence[Reference]) -> Reference | None:
        """The draw with the largest error in terms of its limit; None where all results are right."""
        excess = {
            label: max(errors.excess for errors in found.values())
            for label, found in self.errors.items()
            if not all(errors.ok for errors in found.values())
        }
        return max((draw for draw in draws if draw.label in excess), key=lambda draw: excess[draw.label], default=None)

    def report(self) -> BackendReport:
        found = BackendReport(
            self._name,
            worst_errors(list(self.errors.values())),
            statistics.median(self._seconds) if self._seconds else 0.0,
            fallbacks=self._backend.fallbacks,
            segments=self._backend.segments,
            native_calls=self._backend.native_calls,
        )
        wrong = [f"{name}: {errors.why}" for name, errors in found.errors.items() if not errors.ok]
        if wrong:
            status = "differs" if self._config.is_default(self._name) else "ran"
            return replace(found, status=status, reason="; ".join([*wrong, *filter(None, [self.difference])]))
        found = replace(found, reason="; ".join(self._excused))
        return self._with_refusal(found) if self._refusals else found

    def _with_refusal(self, found: BackendReport) -> BackendReport:
        """`found` with what the backend does not run; the first draw stands for all."""
        label, error = next(iter(self._refusals.items()))
        is_lack = isinstance(error, UsageError | ModuleNotFoundError) or lacks_kernel(error)
        reason = message_with_notes(error) if isinstance(error, OnnxlineError) else f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError):
            reason = f"left out, since {error.name} is not installed"
        if self.errors:
            count = plural(len(self.errors) + len(self._refusals), "draw")
            reason = f"runs on {len(self.errors)} of {count}, and not on {label}: {reason}"
        return replace(
            found,
            status="unsupported" if is_lack else "failed",
            reason=reason,
            operators=error.operators if isinstance(error, Unsupported) else (),
        )


def _describe_first_difference(backend: Backend, model: OnnxFile, feeds: Feeds, config: RunConfig) -> str:
    """Where the values of `backend` begin to differ from those of onnxruntime; empty where no single value does, or
    the model has no graph as a whole."""
    from pipeline.verify.divergence import compare_backends  # imports the IR, which few runs need here

    try:
        graph = model.graph_for(shapes_of(feeds))
        judges = BACKENDS["onnxruntime"](model)
        found = compare_backends(judges, backend, graph, feeds, config.verify.compared_within, first_only=True)
    except Exception:  # of whatever kind: the results are known to be wrong, and this only says where
        return ""
    return "".join(
        f"first at {divergence.value!r} ({divergence.kind}): {divergence.errors.why}"
        for divergence in found.divergences
    )


def _write_ir(
    backend: Backend, reference: Reference, config: RuntimeConfig, model: Path, workspace: Workspace
) -> dict[str, Any]:
    """Write the IR and the plan for the shapes of `reference`; return the fields of the report that they fill.

    A model that runs in segments has neither as a whole, nor has a backend that makes no plan.
    """
    whole = backend.compile_whole(shapes_of(reference.feeds))
    if whole is None:
        return {}
    from pipeline.stages.plan_files import with_memory_map, write_graph, write_plan_files  # not above: see there

    graph, program = whole
    plan = with_memory_map(program.plan, config)
    files = [*write_graph(graph, workspace), *write_plan_files(plan, graph, model, workspace)]
    return {
        "ops": len(graph.ops),
        "values": len(graph.values),
        "device": config.device,
        "arena_bytes": plan.arena_bytes,
        "live_bytes": plan.live_bytes,
        "packed_bytes": program.packed_bytes,
        "aliases": len(plan.alias),
        "generic_calls": plan.generic_calls(),
        "files": tuple((file.name, *stamp(file)) for file in files),
    }


def write_ir_alone(shapes: Shapes, workspace: Workspace, observer: Observer) -> RuntimeReport:
    """Write the IR of a model that is not run; its weights stay where they are.

    No plan is made: the machine that runs such a model has the weights, and compiles the IR there.

    Args:
        shapes: input → its shape.
        workspace: where `model.onnx` of the run is, and where the IR is written.
        observer: gets a note if an operator of the model has no IR.

    Returns:
        The report of the stage, with the files that were written and no backends.
    """
    remove_ir(workspace)
    try:
        graph = OnnxFile(written_path(workspace)).graph_for(shapes)
    except OnnxlineError as error:
        observer(Note(f"no IR was written: {error}"))
        return RuntimeReport(backends=())
    from pipeline.stages.plan_files import write_graph

    files = write_graph(graph, workspace)
    return RuntimeReport(backends=(), files=tuple((file.name, *stamp(file)) for file in files))


def find_trainable(path: Path, digests: frozenset[str], globs: Sequence[str]) -> frozenset[str]:
    """Names of the initializers that hold an `nn.Parameter`'s bytes, or that match the user's globs."""
    if not digests and not globs:
        return frozenset()
    model = read_model(path)
    return frozenset(
        tensor.name
        for tensor in model.proto.graph.initializer
        if any(is_named(tensor.name, glob) for glob in globs)
        or (digests and key_of_parameter(tensor, model.digest(tensor)) in digests)
    )
