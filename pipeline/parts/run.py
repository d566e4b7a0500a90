"""The run of all parts of a source: each part as a run of its own, then the folder of models, then the chain."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from passes.errors import OnnxlineError
from pipeline.config import RunConfig
from pipeline.errors import CheckFailed, UsageError
from pipeline.events import Event, Note, Observer, PartStarted, Progress, RunLog, StageEnded, StageStarted
from pipeline.model_run import ModelRun, exit_code_of
from pipeline.parts.diffusion import prove_images, write_pipeline
from pipeline.parts.folder import PARTS, describe_files, remove_other_parts, store_once, where_to_load, write_models
from pipeline.parts.own import prove_own_chain, write_own_parts
from pipeline.parts.report import remove_quantized, write_parts_report
from pipeline.parts.result import PartsResult
from pipeline.parts.sessions import MODELS, backends_of
from pipeline.report import ChainReport, ImageReport, Report, ValuesReport
from pipeline.result import RunResult
from pipeline.stages.check import remember_settings
from pipeline.stages.report import has_good_report, write_quietly, write_settings
from pipeline.stages.source import load_pipeline, open_source, why_not_compared
from pipeline.workspace import Workspace, key_of, versions

if TYPE_CHECKING:
    from pipeline.export.source import Source
    from pipeline.export.transformers_class import LoadedModel


class PartsRun:
    """One run of all parts.

    Args:
        config: with `model.task`, `model.diffusers` or `model.parts`, and without `model.part`.
        workspace: of the whole; the parts have theirs below it.
    """

    def __init__(self, config: RunConfig, workspace: Workspace, observer: Observer) -> None:
        self.config, self.workspace, self._observer = config, workspace, observer
        self.log = RunLog()
        self.runs: dict[str, ModelRun] = {}
        self.results: dict[str, RunResult] = {}
        self.failures: dict[str, OnnxlineError] = {}
        self.chain: tuple[ChainReport | ImageReport | ValuesReport, ...] = ()
        self.cached: list[str] = []
        self.seconds: dict[str, float] = {}
        self._pipeline: LoadedModel | None = None
        """Of diffusers, where that is the source."""
        self._origin: tuple[Any, Path | None] = (None, None)
        """The configuration of a model of transformers, and its folder."""

    def run(self) -> PartsResult:
        """Run the parts; those of an earlier run are taken where nothing has changed.

        Raises:
            OnnxlineError: of a part that failed, after the others were run; see `Pipeline.run`.
            CheckFailed: the parts together do not give the tokens that torch gives.
        """
        with self.workspace.acquire():
            remember_settings(self.config, self.workspace)
            try:
                return self._execute()
            except BaseException as error:
                code, failure = exit_code_of(error), str(error) or "stopped"
                if code != UsageError.exit_code or not has_good_report(self.workspace):
                    write_quietly(lambda: self._report(failure, code))
                raise
            finally:
                write_quietly(lambda: self.workspace.write_text("log.txt", self.log.text()))

    def _execute(self) -> PartsResult:
        for name in self.config.model.part_names:
            self._run_part(name)
        self._raise_failure()
        self._put_together()
        self._prove_chain()
        write_settings(self.config, versions(), self.workspace, is_given=False)
        report = self._report()
        first, *_ = self.results.values()
        code = {file: digest for part in self.results.values() for file, digest in part.code.items()}
        stages = (first.export, first.optimize, first.runtime, report, tuple(self.cached))
        return PartsResult(self.workspace.folder, *stages, code, None, dict(self.results), self.chain)

    def run_alone(self, name: str) -> RunResult:
        """Run one part, at the same time as others perhaps; `run` then takes it from there.

        Raises:
            OnnxlineError: see `Pipeline.run`; a run of all parts is at work in the folder.
        """
        with self.workspace.hold(shared=True):
            return self._begin_part(name).run()

    def _begin_part(self, name: str) -> ModelRun:
        self._send(PartStarted(name))
        workspace = Workspace(self.workspace.folder / PARTS / name)
        return ModelRun(self.config.of_part(name), workspace, self._send, open_source=self._open)

    def _run_part(self, name: str) -> None:
        begun = time.perf_counter()
        run = self.runs[name] = self._begin_part(name)
        try:
            self.results[name] = run.run()
            self.cached += [f"{name}: {stage}" for stage in self.results[name].cached]
        except OnnxlineError as error:
            self.failures[name] = error
        finally:
            self.seconds[name] = time.perf_counter() - begun

    def _open(self, config: RunConfig) -> Source:
        """The source of a part, which of one's own is that of a run by itself. A model of transformers is loaded for
        each part, and goes with its run's source: held, its weights would be in memory while passes run. A pipeline of
        diffusers is another model in each part."""
        if self.config.model.parts is not None:
            return open_source(config)
        if config.model.diffusers is not None:
            loaded = self._pipeline = self._pipeline or load_pipeline(config.model, self.workspace.stages)
        else:
            from pipeline.export.parts import load_for_parts

            loaded = load_for_parts(config.model, weightless=config.weightless)
            self._origin = loaded.module.config, loaded.folder
        return open_source(config, loaded)

    def _raise_failure(self) -> None:
        """Raise the worst failure of a part, if there is any, with the name of the part where others ended well."""
        if not self.failures:
            return
        name, error = max(self.failures.items(), key=lambda item: exit_code_of(item[1]))
        if self.results:
            kept = " and ".join(f"{PARTS}/{part}" for part in self.results)
            error.args = (f"part {name}: {error}; the other parts are in {kept}", *error.args[1:])
        raise error

    def _put_together(self) -> None:
        with self._stage("models") as outcome:
            finals = {name: result.model for name, result in self.results.items()}
            if self.config.model.parts is not None:
                files, written, is_known = write_own_parts(finals, self.workspace)
                self._store_once(written)
            elif self._pipeline is not None:  # its parts share no weights
                files, is_known = write_pipeline(finals, self._pipeline.module, self.workspace)
            else:
                refers = self.config.export.weights == "referenced"
                files, is_known = write_models(finals, *self._origin, self.workspace, refers=refers)
                if refers:
                    self._send(Note(where_to_load(finals)))
                else:
                    self._store_once({name: f"{name}.onnx" for name in finals})
            if not is_known:
                remove_quantized(self.workspace)
            remove_other_parts(finals, self.workspace)
            outcome["detail"], outcome["cached"] = describe_files(files), is_known

    def _store_once(self, written: Mapping[str, str]) -> None:
        if store_once({name: run.workspace for name, run in self.runs.items()}, self.workspace, written):
            for run in self.runs.values():
                run.report()  # which lists the files of the run

    def _prove_chain(self) -> None:
        with self._stage("chain") as outcome:
            if why_not_compared(self.config):
                outcome["detail"] = "nothing is run"
                return
            if self.config.model.parts is not None and self.config.model.chain is None:
                outcome["detail"] = "none: model.chain is not given, and each part is proven by itself"
                return
            if self.config.model.task == "feature-extraction":
                outcome["detail"] = "one part, which is proven by itself"
                return
            runs = [run.key for run in self.runs.values()]
            key = key_of(runs, self.config.verify.model_dump(mode="json"), self.config.runtime.model_dump(mode="json"))
            known = self.workspace.load("chain", key, tuple[ChainReport | ImageReport | ValuesReport, ...])
            if self.config.model.chain is not None:  # what the user's function imports is not known, so it runs anew
                self.chain = self._prove_own()
            elif known is None:
                self.chain = prove(self._proven, self.workspace.folder / MODELS, self.config, self._send)
            else:
                self.chain, outcome["cached"] = known, True
            outcome["detail"] = "; ".join(chain.sentence for chain in self.chain)
            wrong = next((chain for chain in self.chain if not chain.is_right), None)
            if wrong is not None:
                what = "generate as torch does" if self.config.model.chain is None else "give what their sources give"
                raise CheckFailed(f"the parts together do not {what} on {wrong.backend}: {wrong.why}")
            self.workspace.save("chain", key, self.chain)
        for chain in self.chain:
            if chain.why:
                self._send(Note(f"{chain.backend}: {chain.why}"))

    def _prove_own(self) -> tuple[ValuesReport, ...]:
        sources = {name: partial(self._open, self.config.of_part(name)) for name in self.results}
        finals = {name: result.model for name, result in self.results.items()}
        taken = [{row.name for row in result.runtime.backends if not row.shortfall} for result in self.results.values()]
        backends = [name for name in backends_of(self.config) if all(name in names for names in taken)]
        return prove_own_chain(
            sources,
            finals,
            self.config,
            backends or ["onnxruntime"],
            lambda name, done, total: self._send(Progress("chain", name, done, total)),
        )

    def _proven(self) -> Any:
        """What the chain is compared with: the pipeline of diffusers, or the module of the last part."""
        from pipeline.export.parts import part_of

        if self._pipeline is not None:
            return self._pipeline.module
        return part_of(self._open(self.config.of_part([*self.runs][-1])))

    def _report(self, failure: str = "", exit_code: int = 0) -> Report:
        reports = {name: run.written for name, run in self.runs.items() if run.written is not None}
        known = (tuple(self.cached), dict(self.seconds), self.chain)
        return write_parts_report(self.config.name, reports, *known, versions(), self.workspace, failure, exit_code)

    @contextmanager
    def _stage(self, name: str) -> Iterator[dict[str, Any]]:
        self._send(StageStarted(name))
        begun = time.perf_counter()
        outcome: dict[str, Any] = {"detail": "", "cached": False}
        yield outcome
        self.seconds[name] = time.perf_counter() - begun
        if outcome["cached"]:
            self.cached.append(name)
        self._send(StageEnded(name, self.seconds[name], outcome["cached"], outcome["detail"]))

    def _send(self, event: Event) -> None:
        self.log.add(event)
        self._observer(event)


def prove(
    open_subject: Callable[[], Any], models: Path, config: RunConfig, send: Observer
) -> tuple[ChainReport | ImageReport | ValuesReport, ...]:
    """`prove_chain` or `prove_images`, which load torch, with their progress as events."""
    from pipeline.parts.chain import prove_chain

    check = prove_chain if config.model.diffusers is None else prove_images
    return check(open_subject, models, config, lambda name, done, total: send(Progress("chain", name, done, total)))
