"""The run of one model or part: from a source to a verified model, its IR and plan. Read `ModelRun.execute` first."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from passes.advisories.known import quarantined_by_entry
from passes.context import PassContext, open_context
from passes.custom_ops.declarations import files_of
from passes.recipe.recipe import names_of
from passes.recipe.user_passes import code_digest
from passes.suggest import bytes_text, plural
from passes.worker.platforms import missing_here, return_free_memory
from pipeline.config import RunConfig
from pipeline.errors import UsageError, refusal_of
from pipeline.events import Event, Note, Observer, PassesEnded, RunLog, StageEnded, StageStarted
from pipeline.export.source import Source, TorchSource
from pipeline.report import BackendReport, ExportReport, PassesReport, Report, RuntimeReport
from pipeline.result import RunResult
from pipeline.stages.check import remember_settings
from pipeline.stages.export import (
    WORTH_COLLECTING,
    export_and_compare,
    exported_files,
    exported_path,
    refuse_wrong_export,
)
from pipeline.stages.passes import refuse_reverts, run_passes
from pipeline.stages.report import (
    Findings,
    has_good_report,
    restore_quantization,
    set_aside_quantization,
    write_quietly,
    write_report,
    write_settings,
)
from pipeline.stages.runtime import refuse_wrong_results, remove_ir, run_backends, write_ir_alone
from pipeline.stages.source import code_of, fingerprint, open_source, traced_shapes, why_not_compared
from pipeline.verify.backends import Shapes
from pipeline.verify.references import References, compute_references, describe_zeros, outputs_digest, plan_draws
from pipeline.verify.user_inputs import input_files, read_inputs
from pipeline.workspace import Workspace, digest_of_file, key_of, own_code_digest, versions

Record = TypeVar("Record", ExportReport, PassesReport, RuntimeReport)


class ModelRun:
    """One run: a method for each stage, and the results so far.

    A stage has one name everywhere: its method, its events, its part of the report, its entry in `cached`, and its
    section of the configuration, if any.

    Args:
        source: a model that exists already.
        open_source: makes or opens the source, where there is none yet; by default as the configuration names it.
        writes_page: whether a run that ends well writes `report.html`.
    """

    def __init__(
        self,
        config: RunConfig,
        workspace: Workspace,
        observer: Observer,
        source: Source | None = None,
        open_source: Callable[[RunConfig], Source] | None = None,
        *,
        writes_page: bool = True,
    ) -> None:
        self.config, self.workspace, self._observer, self._source = config, workspace, observer, source
        self._open_source, self._writes_page = open_source or self._open, writes_page
        self.log = RunLog()
        self.versions = versions()
        self.key = ""
        """Digest of everything that the next stage depends on."""
        self.export_key = ""
        self.code: dict[str, str] = {}
        self.findings = Findings()
        self.replaces_results = False
        """Whether files of an earlier run have been replaced by this one."""
        self.simulated = ""
        """Digest of the model that a simulation was made of, whose files are set aside."""
        self.written: Report | None = None
        """The report, once it is written."""

    def run(self) -> RunResult:
        """Run in the folder, alone, and write the log and, of a run that fails, the report.

        Raises:
            OnnxlineError: as for `Pipeline.run`.
        """
        with self.workspace.acquire():
            remember_settings(self.config, self.workspace)
            try:
                return self.execute()
            except BaseException as error:
                code = exit_code_of(error)
                if code != UsageError.exit_code or self.replaces_results or not has_good_report(self.workspace):
                    self.report(str(error) or "stopped", code)
                raise
            finally:
                write_quietly(lambda: self.workspace.write_text("log.txt", self.log.text()))

    def execute(self) -> RunResult:
        source, limits = self.source(), self.config.passes  # make the module, or open the ONNX file
        with open_context(limits.timeout_s, limits.memory_gib, self.workspace.scratch) as context:
            references = self.reference(source, context)  # run torch, or that file, on every draw
            exported = self.export(source, references, context)  # torch → ONNX, compared with the reference
            references = references.restrict_to(exported.draws, exported.not_covered)
            path, shapes = exported_path(self.config, source, self.workspace), traced_shapes(source)
            # Cycles of its parts would keep the module alive: its weights, which only an export moves into the file, or
            # a tensor for each of them.
            del source
            was_moved = "export" not in self.findings.cached and not self.config.weightless
            if exported.weight_bytes > WORTH_COLLECTING and not was_moved:
                gc.collect()
                return_free_memory()
            optimized = self.passes(path, references, exported, context)  # each alone, proven after each change
        executed = self.runtime(exported, references, shapes)  # import, lower, plan, run, compare with the reference
        write_settings(self.config, self.versions, self.workspace, is_given=self._source is not None)
        report = self.report()
        stages = (exported, optimized, executed, report, report.cached)
        return RunResult(self.workspace.folder, *stages, self.code, references.sampler)

    def _open(self, config: RunConfig) -> Source:
        return open_source(config, stages=self.workspace.stages)

    def source(self) -> Source:
        with self.stage("source") as outcome:
            input_files(self.config.verify.inputs)  # a missing file is named before a model is loaded
            source = self._source or self._open_source(self.config)
            code = code_of(source, self.config.model)
            identity = fingerprint(source, self.config, code)
            self.code = {str(file): digest_of_file(file) for file in code}
            self._depends_on(self.config.model, self.config.export, identity, own_code_digest(), self.versions)
            self._depends_on([digest_of_file(file) for file in files_of(self.config.custom_ops)])
            weights = f"weights: {source.weights}, " if isinstance(source, TorchSource) and source.weights else ""
            outcome.detail = f"{plural(len(source.inputs), 'input')}, {weights}fingerprint {identity[:8]}"
        notes = source.notes if isinstance(source, TorchSource) else ()
        self._send_notes(filter(None, (missing_here(), *notes)))
        return source

    def reference(self, source: Source, context: PassContext) -> References:
        """Computed in each run, never cached: outputs identify the model more safely than its files do."""
        with self.stage("reference") as outcome:
            if why_not_compared(self.config):
                outcome.detail = f"none: {why_not_compared(self.config)}"
                return References(())
            user_inputs = read_inputs(self.config.verify, source.inputs)
            plan = plan_draws(source, self.config.model, self.config.verify, user_inputs.draws)
            references = compute_references(source, plan, context)
            references = replace(references, skipped=(*user_inputs.notes, *references.skipped))
            self._depends_on(self.config.verify, outputs_digest(references.draws))
            outcome.detail = ", ".join(reference.label for reference in references.draws)
        self._send_notes((*user_inputs.notes, *describe_zeros(references.draws)))
        return references

    def export(self, source: Source, references: References, context: PassContext) -> ExportReport:
        path = exported_path(self.config, source, self.workspace)
        with self.stage("export") as outcome:
            self.export_key = self.key
            report = self._load_or_make(
                outcome,
                ExportReport,
                lambda: export_and_compare(
                    self.config, source, references, self.workspace, context, is_own=self._source is None
                ),
                refuse=lambda report: refuse_wrong_export(report, path, references),
            )
            size = bytes_text(report.weight_bytes)
            outcome.detail = f"{report.origin}, opset {report.opset}, {plural(report.nodes, 'node')}, {size}"
        self._send_notes((*report.limits, *report.not_compared))
        return report

    def passes(self, path: Path, references: References, exported: ExportReport, context: PassContext) -> PassesReport:
        wishes = self.config.passes

        def make() -> PassesReport:
            computed_in, begin = exported.computed_in, self._begin_results
            report = run_passes(self.config, path, references, self.workspace, self._send, context, computed_in, begin)
            restore_quantization(self.simulated, self.workspace)
            # The exported model is another file now where it shares weights with the final one.
            self.findings.export = replace(exported, files=exported_files(path, self.workspace))
            self.workspace.save("export", self.export_key, self.findings.export, self.workspace.notes("export"))
            return report

        with self.stage("passes") as outcome:
            self._depends_on(wishes, code_digest(names_of(wishes.recipe)), quarantined_by_entry(wishes.skip))
            if wishes.encodings is not None:
                self._depends_on(digest_of_file(Path(wishes.encodings)))
            report = self._load_or_make(outcome, PassesReport, make)
            self._send(PassesEnded(report.passes, report.structures))
            outcome.detail = f"{plural(len(report.passes), 'step')}, {plural(report.nodes, 'node')} left"
            refuse_reverts(self.config, report)
        return report

    def runtime(self, exported: ExportReport, references: References, shapes: Shapes) -> RuntimeReport:
        with self.stage("runtime") as outcome:
            self._depends_on(self.config.runtime)
            if why_not_compared(self.config):
                outcome.detail = "nothing is run"
                if not self.config.model.part:
                    self.findings.runtime = RuntimeReport(backends=())
                    return self.findings.runtime
                report = self._load_or_make(
                    outcome, RuntimeReport, lambda: write_ir_alone(shapes, self.workspace, self._send)
                )
                outcome.detail += ", the IR is written" if report.files else ""
                return report
            report = self._load_or_make(
                outcome,
                RuntimeReport,
                lambda: run_backends(self.config, exported, references, self.workspace, self._send),
                refuse=refuse_wrong_results,
            )
            outcome.detail = ", ".join(map(_backend_text, report.backends)) or "torch"
        return report

    def report(self, failure: str = "", exit_code: int = 0) -> Report:
        """Write the report, also that of a run that failed."""
        asked = self.config, self.findings, self.versions, self.workspace
        self.written = write_report(*asked, failure, exit_code, with_page=self._writes_page or bool(failure))
        return self.written

    def _begin_results(self) -> None:
        """Called before the first result of an earlier run is replaced."""
        self.replaces_results = True
        self.workspace.forget("passes")
        remove_ir(self.workspace)
        self.simulated = set_aside_quantization(self.workspace)

    def _depends_on(self, *parts: Any) -> None:
        """Add `parts`, sections of the configuration or plain data, to the key of all later stages."""
        plain = [part.model_dump(mode="json") if isinstance(part, BaseModel) else part for part in parts]
        self.key = key_of(self.key, *plain)

    def _load_or_make(
        self,
        outcome: _StageOutcome,
        kind: type[Record],
        make: Callable[[], Record],
        refuse: Callable[[Record], None] = lambda _: None,
    ) -> Record:
        """Load the result of an earlier run if nothing that it depends on has changed; otherwise call `make`.

        A result that `refuse` raises for goes into the report of the failed run, and is not saved for later runs.
        """
        known = self.workspace.load(outcome.stage, self.key, kind)
        if known is not None and self.workspace.is_unchanged(known.files):
            outcome.is_cached = True
            setattr(self.findings, outcome.stage, known)
            return known
        record = make()
        setattr(self.findings, outcome.stage, record)
        refuse(record)
        self.workspace.save(outcome.stage, self.key, record, self.findings.notes[outcome.stage])
        return record

    @contextmanager
    def stage(self, name: str) -> Iterator[_StageOutcome]:
        """Send the events at the begin and the end of a stage; notes of a cached stage are sent again."""
        self._send(StageStarted(name))
        self.findings.notes[name] = []
        begun = time.perf_counter()
        outcome = _StageOutcome(name)
        yield outcome
        return_free_memory()
        seconds = self.findings.seconds[name] = time.perf_counter() - begun
        if outcome.is_cached:
            self.findings.cached.append(name)
            self._send_notes(self.workspace.notes(name))
        self._send(StageEnded(name, seconds, outcome.is_cached, outcome.detail))

    def _send(self, event: Event) -> None:
        self.log.add(event)
        if isinstance(event, Note):
            self.findings.notes[next(reversed(self.findings.notes))].append(event.text)
        self._observer(event)

    def _send_notes(self, texts: Iterable[str]) -> None:
        for text in texts:
            self._send(Note(text))


@dataclass(slots=True)
class _StageOutcome:
    """What the event that ends a stage says; a stage fills it in while it runs."""

    stage: str
    detail: str = ""
    is_cached: bool = False


def _backend_text(backend: BackendReport) -> str:
    return f"{backend.name} {backend.shortfall}".strip()


def exit_code_of(error: BaseException) -> int:
    """The exit code of the command that `error` ends."""
    return 130 if isinstance(error, KeyboardInterrupt) else getattr(refusal_of(error) or error, "exit_code", 3)
