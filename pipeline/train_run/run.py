"""A training from a configuration: model, recorded step, loop, evaluation, ONNX, report. Read `_execute` first."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
from torch import nn

from passes.proof.numbers import Tolerance
from passes.suggest import plural
from passes.visible import Table, TableResult
from passes.weights.files import replace_tensors
from pipeline.authoring import Model, TrainingHistory, TrainingLoop
from pipeline.authoring.fit import FitLimits, history_path
from pipeline.config import RunConfig
from pipeline.errors import SourceError, UsageError, refusal_of
from pipeline.events import Event, Note, Observer, RunLog
from pipeline.export.user_code import call_user_code, load_function
from pipeline.report import Pictures, Report, report_json
from pipeline.report.html import page_of, render
from pipeline.report.model import TrainingReport
from pipeline.result import RunResult
from pipeline.stages.check import check_settings, check_train
from pipeline.stages.report import write_quietly
from pipeline.train_run.source import (
    TrainSource,
    make_loss,
    make_optimizer,
    make_schedule,
    open_train_source,
    quantize,
    training_key,
)
from pipeline.training import StepComparison, TrainProgram, compare_step, record_step
from pipeline.workspace import Workspace, make_folder, versions

STATES: Final = "train.safetensors"
"""The states of the step, from which a training goes on."""

HISTORY: Final = history_path(Path(STATES)).name

WEIGHTS: Final = "weights.safetensors"
"""Parameters and buffers by their names in the module, at the end."""

LOG: Final = "log.txt"

MODEL: Final = "model.onnx"
"""The trained model, as the main job has left it."""

MAIN_JOB, SIMULATION = "onnx", "quantsim"
"""The folders of the main job after the training, and of the simulation of quantization before it."""

EARLIER: Final = "earlier"
"""The folder of what trainings of other settings have left, each in a folder with its number."""

STAGE: Final = "train"

END: Final = object()
"""Marks the end of an epoch's batches."""


@dataclass(frozen=True, slots=True)
class TrainResult(TableResult):
    """A training that ended well, and its files in `folder`."""

    folder: Path
    training: TrainingReport
    history: TrainingHistory
    files: tuple[str, ...]

    def tables(self) -> Iterator[Table]:
        yield from self.history.tables()
        yield Table("metrics", [(name, f"{value:.4g}") for name, value in self.training.metrics.items()])
        yield Table("files", [(f"{self.folder}/{name}",) for name in self.files])


class TrainRun:
    """One training of one configuration, which goes on where an earlier one of the same settings was stopped.

    Args:
        out: the folder of the artifacts; `runs/<name>-train` below the working directory by default.
        observer: called with each event.
        anew: begin anew even where an earlier training of the same settings was stopped.
    """

    def __init__(
        self, config: RunConfig, out: Path | None = None, observer: Observer = lambda _: None, *, anew: bool = False
    ) -> None:
        with config.name_keys():
            self._config, self._train = config, check_train(config)
        self._workspace = Workspace(out or Path("runs") / f"{config.name}-train")
        self._observer, self._anew = observer, anew
        self._log, self._has_begun, self._earlier_log = RunLog(), False, ""

    def run(self) -> TrainResult:
        """Train until a limit is reached.

        Raises:
            UsageError: the factory, the batches or the loss are wrong.
            NotFinite: the loss of a step is not finite (exit code 1); the states before it are kept.
            KeyboardInterrupt: after Ctrl-C; the same configuration goes on, and so does this object.
        """
        self._log, self._has_begun, self._earlier_log = RunLog(), False, ""
        with self._workspace.acquire():
            try:
                return self._execute()
            finally:  # where this training has not begun, the log of an earlier one stays, as its other files do
                if self._has_begun or not (self._workspace.folder / STATES).exists():
                    write_quietly(lambda: self._workspace.write_text(LOG, self._earlier_log + self._log.text()))

    def compare_step(self, step: int, tolerances: Mapping[str, Tolerance] | None = None) -> StepComparison:
        """Begin anew and do `step` steps, the last step by eager torch too, from the same states. Writes no file.

        Raises:
            UsageError: the training has fewer steps, or trains a quantized model.
        """
        if self._train.quantized:
            raise UsageError(
                "train.quantized is set; expected a training in float, whose step eager torch does as well"
            )
        first = self._first_batch()
        program = self._record(open_train_source(self._config, first, None).module, first)
        schedule = make_schedule(self._train.schedule)
        scheduler = None if schedule is None else schedule(program.optimizer)
        batches = itertools.chain.from_iterable(map(self._batches, range(self._train.epochs)))
        for batch in itertools.islice(batches, step - 1):
            program.step(batch)
            if scheduler is not None:
                scheduler.step()
        batch = next(batches, None)
        if batch is None:
            raise UsageError(f"the training has {plural(program.steps_done, 'step')}, so there is no step {step}")
        return compare_step(
            program, make_loss(self._train), batch, max_norm=self._train.max_norm, tolerances=tolerances
        )

    def _execute(self) -> TrainResult:
        folder = self._workspace.folder
        if self._train.export:
            check_settings(self._config, Workspace(folder / MAIN_JOB))
        quantized = quantize(self._config, folder / SIMULATION, self._send) if self._train.quantized else None
        key = training_key(self._config, self._train, quantized)
        resumes = self._is_begun(key)
        first = self._first_batch()
        source = open_train_source(self._config, first, quantized)
        for text in source.notes:
            self._send(Note(text))
        program = self._record(source.module, first)
        if not resumes:  # not before the settings are known to make a step
            self._begin_anew(key)
        self._has_begun = True
        loop = TrainingLoop(program, make_schedule(self._train.schedule))
        loop.observer = self._send
        limits = FitLimits(self._train.epochs, self._train.steps, self._train.until)
        try:
            history = loop.run(
                self._batches, limits, folder / STATES, resume=resumes, save_every=self._train.save_every
            )
        except BaseException as error:
            if loop.history.records:
                self._report_failure(self._describe(program, loop.history), error)
            raise
        if (limits.steps or limits.until is not None) and not limits.are_reached(program.steps_done, history.records):
            asked = {"train.steps": limits.steps, "train.until": limits.until}
            sought = " and ".join(f"{name} {value}" for name, value in asked.items() if value is not None)
            self._send(
                Note(
                    f"the training ended with train.epochs {limits.epochs} after {plural(program.steps_done, 'step')}, "
                    f"before {sought}; raise train.epochs to train further"
                )
            )
        return self._finish(source, program, history)

    def _finish(self, source: TrainSource, program: TrainProgram, history: TrainingHistory) -> TrainResult:
        """Write what follows the steps: weights, metrics, ONNX and the report; a failure on the way is reported too."""
        training = self._describe(program, history)
        try:
            program.write_back()
            self._write_weights(source.module)
            training = replace(training, metrics=self._evaluate_all(source))
            if self._train.export:
                training = self._export(source, program, training)
        except BaseException as error:
            self._report_failure(training, error)
            raise
        report = self._report(training)
        return TrainResult(self._workspace.folder, training, history, report.files)

    def _export(self, source: TrainSource, program: TrainProgram, training: TrainingReport) -> TrainingReport:
        """Write the trained model to `model.onnx`, by the main job in a folder of its own."""
        folder = self._workspace.folder
        (folder / MODEL).unlink(missing_ok=True)  # a failure leaves no model of another training
        try:
            result = source.export(program, folder / MAIN_JOB, self._send)
            result.save(folder / MODEL)
        except Exception as error:
            error.add_note(
                f"the training has ended, and its weights are in {folder / WEIGHTS}; only its ONNX file was not made. "
                "The same command tries that again, and train.export: false leaves it out"
            )
            raise
        return replace(training, onnx=_describe_model(result))

    def _is_begun(self, key: str) -> bool:
        """Whether the folder has the states of a training of this key, from which this one goes on."""
        states = self._workspace.folder / STATES
        if self._anew or self._workspace.load(STAGE, key, str) is None or not states.exists():
            return False
        with suppress(OSError):  # one that was killed has left none
            self._earlier_log = (self._workspace.folder / LOG).read_text("utf-8", errors="replace")
        self._send(Note(f"going on from {states}"))
        return True

    def _begin_anew(self, key: str) -> None:
        """Set the files of an earlier training aside, so that none of them is taken for one of this training."""
        folder = self._workspace.folder
        own = (STATES, HISTORY, WEIGHTS, MODEL, "report.json", "report.html")
        found = [folder / name for name in own if (folder / name).exists()]
        if found == [folder / HISTORY]:  # of a training that was killed before it saved any state
            found.pop().unlink()
        if found:
            counter = itertools.count(1)
            aside = next(path for path in (folder / EARLIER / str(number) for number in counter) if not path.exists())
            make_folder(aside)
            for file in (*found, *folder.glob(LOG)):
                file.rename(aside / file.name)
            self._send(Note(f"this training begins anew; the files of the previous training are in {aside}"))
        self._workspace.save(STAGE, key, self._config.name)

    def _first_batch(self) -> Any:
        first = next(iter(self._batches(0)), None)
        if first is None:
            raise UsageError(f"train.batches {self._train.batches} gives no batch in the first epoch")
        return first

    def _record(self, module: nn.Module, first: Any) -> TrainProgram:
        optimizer = make_optimizer(self._train.optimizer, module)
        train = self._train
        options: dict[str, Any] = {"max_norm": train.max_norm, "native": train.native, "device": train.device}
        program = record_step(module, make_loss(train), optimizer, first, **options)
        for phase in program.phases:
            if phase.name != "Replay":
                self._send(phase)
        return program

    def _batches(self, epoch: int) -> Iterator[Any]:
        """The batches of an epoch, by the user's function, which may fail at each of them."""
        text = self._train.batches
        function = load_function(text, "train.batches", f"train.batches {text}")
        raises = f"train.batches {text} raises"
        made = call_user_code(lambda: function(epoch, **self._train.args), raises, text)
        if not isinstance(made, Iterable):
            raise SourceError(f"train.batches {text} returns {type(made).__name__}, expected the batches of an epoch")
        batches = call_user_code(lambda: iter(made), raises, text)
        while (batch := call_user_code(lambda: next(batches, END), raises, text)) is not END:
            yield batch

    def _evaluate_all(self, source: TrainSource) -> dict[str, float]:
        """The metrics of the trained model, and those of the models that it is compared with."""
        trained = source.finish()
        if self._train.evaluate is None:
            return {}
        rivals = {title: self._evaluate(make()) for title, make in source.rivals.items()}
        compared = {f"{name} {title}": value for title, found in rivals.items() for name, value in found.items()}
        return {**compared, **self._evaluate(trained)}

    def _evaluate(self, trained: nn.Module | Model) -> dict[str, float]:
        text = self._train.evaluate or ""
        function = load_function(text, "train.evaluate", f"train.evaluate {text}")
        with torch.no_grad():
            found = call_user_code(lambda: function(trained, **self._train.args), f"train.evaluate {text} raises", text)
        if not isinstance(found, Mapping):
            raise SourceError(f"train.evaluate {text} returns {type(found).__name__}, expected floats by name")
        try:
            return {str(name): float(value) for name, value in found.items()}
        except (TypeError, ValueError, RuntimeError) as error:  # the last of a tensor with several elements
            raise SourceError(f"train.evaluate {text} returns what is no number: {error}") from error

    def _write_weights(self, module: nn.Module) -> None:
        """Write the weights. A tied parameter is stored once, since safetensors refuses tensors that share memory."""
        with replace_tensors(self._workspace.folder / WEIGHTS) as temporary:
            safetensors.torch.save_model(module, str(temporary))

    def _describe(self, program: TrainProgram, history: TrainingHistory) -> TrainingReport:
        settings = ", ".join(f"{name}={value}" for name, value in self._train.optimizer.settings.items())
        return TrainingReport(
            steps=program.steps_done,
            last_loss=history.last_loss if history.records else None,
            loss=self._train.loss,
            optimizer=f"{self._train.optimizer.name}({settings})",
            parameters=sum(param.numel() for param in program.module.parameters() if param.requires_grad),
            ops=len(program.graph.ops),
            phases=history.phases,
            losses=history.records,
        )

    def _report_failure(self, training: TrainingReport, error: BaseException) -> None:
        code = 130 if isinstance(error, KeyboardInterrupt) else getattr(refusal_of(error) or error, "exit_code", 3)
        write_quietly(lambda: self._report(training, str(error) or "stopped", code))

    def _report(self, training: TrainingReport, failure: str = "", exit_code: int = 0) -> Report:
        """Write `report.json` and `report.html`."""
        present = {path.name for path in self._workspace.folder.iterdir() if path.is_file()}
        report = Report(
            name=self._config.name,
            exit_code=exit_code,
            failure=failure,
            export=None,
            passes=(),
            structures=(),
            sensitivity=None,
            runtime=None,
            versions=versions(),
            cached=(),
            seconds={phase.name: phase.seconds for phase in training.phases},
            files=tuple(sorted(present | {"report.json", "report.html", LOG})),
            training=training,
        )
        self._workspace.write_text("report.json", report_json(report))
        self._workspace.write_text("report.html", render(page_of(report, Pictures(), self._workspace.folder)))
        return report

    def _send(self, event: Event) -> None:
        self._log.add(event)
        self._observer(event)


def _describe_model(result: RunResult) -> str:
    """What the main job made, in a few words."""
    kept = [verdict.name for verdict in result.structures if verdict.kept]
    listed = f", {plural(len(kept), 'structure')} kept" if kept else ""
    return (
        f"{MODEL}: {plural(result.optimize.nodes, 'node')}{listed}; the report of its proof is {MAIN_JOB}/report.html"
    )
