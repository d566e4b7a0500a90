"""The whole journey: from a configuration to a verified model, its IR and its plan. Read this first."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from passes.advisories.known import quarantines
from passes.context import open_context
from passes.recipe.recipe import names_of
from passes.recipe.user_passes import code_digest
from passes.worker.platforms import missing_here
from pipeline.config import RunConfig
from pipeline.errors import UsageError
from pipeline.events import Event, Note, Observer, Optimized, StageEnded, StageStarted
from pipeline.export.source import Source, TorchSource
from pipeline.log import RunLog
from pipeline.report import BackendReport, ExportReport, OptimizeReport, Pictures, Report, RuntimeReport, report_json
from pipeline.report.html import page_of, render
from pipeline.result import RunResult
from pipeline.stages.check import check_settings, default_folder, remember_settings
from pipeline.stages.export import export, exported_files, exported_path, refuse_wrong_export
from pipeline.stages.optimize import optimize, refuse_reverts, still_there
from pipeline.stages.referred import not_compared
from pipeline.stages.source import code_of, fingerprint, open_source
from pipeline.verify.references import References, compute_references, outputs_digest, plan_draws
from pipeline.verify.user_inputs import input_files, read_inputs
from pipeline.versions import digest_of_file, own_code, versions
from pipeline.workspace import Workspace, key_of

__all__ = ["Pipeline"]


class Pipeline:
    """One run of one configuration.

    Args:
        config: as read by `RunConfig.from_yaml`.
        out: the folder of the artifacts; `runs/<name>` below the working directory by default.
        observer: is told what happens; nothing is printed.
        source: the model, where it is at hand and need not be made from `config.model`.
        is_checked: whether `check_settings` has been called already.
    """

    def __init__(
        self,
        config: RunConfig,
        out: Path | None = None,
        observer: Observer = lambda _: None,
        source: Source | None = None,
        *,
        is_checked: bool = False,
    ) -> None:
        self.config = config
        self.folder = default_folder(config, out)
        self._observer = observer
        self._source = source
        self._is_checked = is_checked

    def run(self) -> RunResult:
        """Do what has changed since the last run, and take the rest from there.

        Raises:
            UsageError, PassError: something that was given is wrong (exit code 2); the report of an earlier run that
                ended well stays, unless its model has been replaced.
            CheckFailed: the export, a pass under `strict`, or the final model is not right (exit code 1).
        """
        workspace = Workspace(self.folder)
        if not self._is_checked:
            check_settings(self.config, workspace)
        with workspace.opened():
            remember_settings(self.config, workspace)
            journey = _Journey(self.config, workspace, self._observer, self._source)
            try:
                return journey.travel()
            except BaseException as error:
                code = _exit_code_of(error)
                if code != UsageError.exit_code or not journey.leaves_good_report():
                    journey.write_report(str(error) or "stopped", code)
                raise
            finally:
                journey.write_log()


class _Journey:
    """The state of a run: what is known so far."""

    def __init__(
        self, config: RunConfig, workspace: Workspace, observer: Observer, source: Source | None = None
    ) -> None:
        self.config, self.workspace, self._tell, self._source = config, workspace, observer, source
        self.log = RunLog()
        self.versions = versions()
        self.key = ""
        """A digest of everything that the next stage depends on."""
        self.code: dict[str, str] = {}
        self.export_key = ""
        self.exported: ExportReport | None = None
        self.optimized: OptimizeReport | None = None
        self.executed: RuntimeReport | None = None
        self.seconds: dict[str, float] = {}
        self.cached: list[str] = []
        self.replaces_results = False
        """Whether files of an earlier run have been replaced by this one."""
        self.notes: dict[str, list[str]] = {"": []}
        """By stage; the last one is running."""

    def travel(self) -> RunResult:
        source = self.open_source()
        references = self.compute_references(source)
        exported = self.export(source, references)
        references = references.held_by(exported.draws, exported.not_covered)
        optimized = self.optimize(source, references, exported)
        executed = self.execute(exported, references)
        self.workspace.write_text("run.yaml", self._resolved())
        report = self.write_report("", 0)
        return RunResult(self.workspace.folder, exported, optimized, executed, report, tuple(self.cached), self.code)

    def open_source(self) -> Source:
        with self.stage("source") as note:
            input_files(self.config.verify.inputs)  # a missing file is named before a model is loaded
            source = self._source or open_source(self.config)
            identity = fingerprint(source, self.config)
            self.code = {str(file): digest_of_file(file) for file in code_of(source, self.config.model)}
            self._depends_on(self.config.model, self.config.export, identity, own_code(), self.versions)
            weights = f"weights: {source.weights}, " if isinstance(source, TorchSource) and source.weights else ""
            note(f"{len(source.inputs)} inputs, {weights}fingerprint {identity[:8]}")
        notes = source.notes if isinstance(source, TorchSource) else ()
        for said in filter(None, (missing_here(), *notes)):
            self.tell(Note(said))
        return source

    def compute_references(self, source: Source) -> References:
        """Always: what the module computes says more of what it is than its files do."""
        with self.stage("reference") as note:
            if not_compared(self.config):
                note(f"none: {not_compared(self.config)}")
                return References(())
            given, limits = read_inputs(self.config.verify, source.inputs), self.config.passes
            plan = plan_draws(source, self.config.model, self.config.verify, given.draws)
            with open_context(limits.timeout_s, limits.memory_gib, self.workspace.scratch) as bench:
                references = compute_references(source, plan, bench)
                references = replace(references, skipped=(*given.notes, *references.skipped))
            self._depends_on(self.config.verify, outputs_digest(references.draws))
            note(", ".join(reference.label for reference in references.draws))
        for text in given.notes:
            self.tell(Note(text))
        return references

    def export(self, source: Source, references: References) -> ExportReport:
        with self.stage("export") as note:
            self.export_key = self.key
            found = self.workspace.load("export", self.key, ExportReport)
            if found is not None and still_there(found.files, self.workspace):
                note.cached()
            else:
                found, why = export(self.config, source, references, self.workspace)
                self.exported = found
                refuse_wrong_export(why)
                self.save("export", found)
            self.exported = found
            note(f"{found.origin}, opset {found.opset}, {found.nodes} nodes, {found.weight_bytes / 2**20:.0f} MiB")
        for said in (*found.limits, *found.not_compared):
            self.tell(Note(said))
        return found

    def optimize(self, source: Source, references: References, exported: ExportReport) -> OptimizeReport:
        with self.stage("passes") as note:
            wishes = self.config.passes
            self._depends_on(wishes, code_digest(names_of(wishes.recipe)), quarantines(wishes.skip))
            found = self.workspace.load("passes", self.key, OptimizeReport)
            if found is not None and still_there(found.files, self.workspace):
                note.cached()
            else:
                path = exported_path(self.config, source, self.workspace)
                found = optimize(
                    self.config, path, references, self.workspace, self.tell, exported.computed_in, self.begin_results
                )
                # The exported model is another file now where it shares weights with the final one.
                self.exported = replace(exported, files=exported_files(path, self.workspace))
                self.workspace.save("export", self.export_key, self.exported, self.workspace.notes("export"))
                self.save("passes", found)
            self.optimized = found
            self.tell(Optimized(found.passes, found.structures))
            note(f"{len(found.passes)} steps, {found.nodes} nodes left")
            refuse_reverts(self.config, found)
        return found

    def begin_results(self) -> None:
        """From here on what an earlier run has left is replaced."""
        self.replaces_results = True
        self.workspace.forget("passes")
        from pipeline.stages.execute import remove_ir

        remove_ir(self.workspace)

    def execute(self, exported: ExportReport, references: References) -> RuntimeReport:
        with self.stage("runtime") as note:
            if not_compared(self.config):
                note("nothing is run")
                self.executed = RuntimeReport(backends=())
                return self.executed
            self._depends_on(self.config.runtime)
            found = self.workspace.load("runtime", self.key, RuntimeReport)
            if found is not None and still_there(found.files, self.workspace):
                note.cached()
            else:
                from pipeline.stages.execute import execute, refuse_wrong_results  # loads torch, which takes seconds

                found = execute(self.config, exported, references, self.workspace, self.tell)
                self.executed = found
                refuse_wrong_results(found)
                self.save("runtime", found)
            self.executed = found
            note(", ".join(_outcome_of(backend) for backend in found.backends) or "torch")
        return found

    def _depends_on(self, *parts: Any) -> None:
        """From here on every stage depends on `parts` too: sections of the configuration, or plain data."""
        plain = [part.model_dump(mode="json") if isinstance(part, BaseModel) else part for part in parts]
        self.key = key_of(self.key, *plain)

    def save(self, stage: str, record: Any) -> None:
        self.workspace.save(stage, self.key, record, self.notes[stage])

    def tell(self, event: Event) -> None:
        self.log.add(event)
        if isinstance(event, Note):
            self.notes[next(reversed(self.notes))].append(event.text)
        self._tell(event)

    @contextmanager
    def stage(self, name: str) -> Iterator[_StageNote]:
        self.tell(StageStarted(name))
        self.notes[name] = []
        begun = time.perf_counter()
        note = _StageNote()
        yield note
        self.seconds[name] = time.perf_counter() - begun
        if note.is_cached:
            self.cached.append(name)
            for text in self.workspace.notes(name):
                self.tell(Note(text))
        self.tell(StageEnded(name, self.seconds[name], note.is_cached, note.detail))

    def write_report(self, failure: str, exit_code: int) -> Report:
        """Write `report.json` and `report.html` with what is known so far."""
        report = Report(
            name=self.config.name,
            exit_code=exit_code,
            failure=failure,
            export=self.exported,
            passes=self.optimized.passes if self.optimized else (),
            structures=self.optimized.structures if self.optimized else (),
            sensitivity=self.optimized.sensitivity if self.optimized else None,
            runtime=self.executed,
            versions=self.versions,
            cached=tuple(self.cached),
            seconds=self.seconds,
            files=self._files(),
            marks=self.optimized.marks if self.optimized else (),
            not_compared=not_compared(self.config),
            coverage=self.optimized.coverage if self.optimized and not not_compared(self.config) else None,
            notes=tuple(dict.fromkeys(text for noted in self.notes.values() for text in noted)),
            layers=self.optimized.layers if self.optimized else (),
        )
        _quietly(lambda: self.workspace.write_text("report.json", report_json(report)), when=bool(failure))
        _quietly(lambda: self.workspace.write_text("report.html", self._page(report)), when=bool(failure))
        return report

    def leaves_good_report(self) -> bool:
        """Whether the folder has the report of a run that ended well, with the files that it speaks of."""
        try:
            data = json.loads((self.workspace.folder / "report.json").read_text(encoding="utf-8"))
            return not self.replaces_results and data["exit_code"] == 0
        except (OSError, ValueError, LookupError, TypeError):
            return False

    def _page(self, report: Report) -> str:
        return render(page_of(report, self.optimized.pictures if self.optimized else Pictures(), self.workspace.folder))

    def _files(self) -> tuple[str, ...]:
        """The artifacts, with those that are written last."""
        there = {path.name for path in self.workspace.folder.iterdir() if path.is_file()}
        return tuple(sorted(there | {"report.json", "report.html", "log.txt"}))

    def write_log(self) -> None:
        _quietly(lambda: self.workspace.write_text("log.txt", self.log.text()), when=True)

    def _resolved(self) -> str:
        """The configuration as it was understood, which runs again as it is, with the versions as a comment.

        A module that was given from Python is none that a file could name: a comment says so.
        """
        given = (
            "" if self._source is None else "# The module was given from Python; this file alone does not make it.\n"
        )
        lines = "".join(f"#   {name} {version}\n" for name, version in self.versions.items())
        resolved: dict[str, Any] = self.config.resolved()
        return f"{given}# As resolved by onnxline, with\n{lines}" + yaml.safe_dump(
            resolved, sort_keys=False, allow_unicode=True
        )


def _outcome_of(backend: BackendReport) -> str:
    return f"{backend.name} {backend.shortfall}".strip()


def _exit_code_of(error: BaseException) -> int:
    return 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 3)


class _StageNote:
    """What a stage says of itself when it ends."""

    def __init__(self) -> None:
        self.detail = ""
        self.is_cached = False

    def __call__(self, detail: str) -> None:
        self.detail = detail

    def cached(self) -> None:
        self.is_cached = True


def _quietly(write: Callable[[], object], *, when: bool) -> None:
    """A report of a failure that cannot be written must not hide the failure."""
    try:
        write()
    except Exception:
        if not when:
            raise
