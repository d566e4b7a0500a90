"""A training from a configuration: module, recorded step, loop, evaluation, report. Read `_execute` first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import onnx
import safetensors.torch
import torch
from google.protobuf.message import DecodeError
from torch import nn, optim
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from passes.weights.detached import inner_tensors
from passes.weights.files import replace_when_done
from pipeline.authoring import Model, TrainingHistory, TrainingLoop
from pipeline.authoring.fit import FitLimits, Schedule, history_path
from pipeline.config import ModelConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig
from pipeline.errors import ConfigError, SourceError, UsageError
from pipeline.events import Event, Note, Observer, PhaseEnded, RunLog
from pipeline.export.factory import plain_module
from pipeline.export.user_code import call_user_code, check_function, load_function
from pipeline.report import Pictures, Report, report_json
from pipeline.report.html import page_of, render
from pipeline.report.training import LossPoint, TrainingPhase, TrainingReport
from pipeline.training import TrainProgram, as_module, record_step
from pipeline.training.batch import LossFunction
from pipeline.versions import digest_of_file, own_code_digest, versions
from pipeline.workspace import Workspace, key_of, make_folder

__all__ = ["TrainResult", "TrainRun", "check_train"]

STATES: Final = "train.safetensors"
"""The states of the step, from which a training goes on."""

WEIGHTS: Final = "weights.safetensors"
"""Parameters and buffers by their names in the module, at the end."""

EARLIER: Final = "earlier"
"""The folder of what trainings of other settings have left, each in a folder with its number."""

STAGE: Final = "train"


@dataclass(frozen=True, slots=True)
class TrainResult:
    """A training that ended well, and its files in `folder`."""

    folder: Path
    training: TrainingReport
    history: TrainingHistory
    files: tuple[str, ...]


def check_train(config: RunConfig) -> TrainConfig:
    """The section `train`, whose functions are looked for without being run.

    Raises:
        UsageError: it is missing, or names what is not there, or the model is none that is trained.
    """
    train, model = config.train, config.model
    if train is None:
        raise ConfigError("the configuration has no section 'train'; expected one with 'batches' at least")
    if model.transformers is not None or model.checkpoint is not None:
        found = "transformers" if model.transformers is not None else "checkpoint"
        raise ConfigError(
            f"train: found model.{found}, expected model.factory or model.onnx, which hold their first weights"
        )
    for key, text in (("batches", train.batches), ("evaluate", train.evaluate), ("loss", train.loss)):
        if text is not None and ":" in text:
            check_function(text, f"train.{key}", f"train.{key} {text}")
    if model.factory is not None:
        check_function(model.factory, "model.factory", f"the factory {model.factory}")
    return train


class TrainRun:
    """One training of one configuration, which goes on where an earlier one of the same settings was stopped.

    Args:
        out: the folder of the artifacts; `runs/<name>-train` below the working directory by default.
        observer: called with each event.
        anew: begin anew in any case.
    """

    def __init__(
        self, config: RunConfig, out: Path | None = None, observer: Observer = lambda _: None, *, anew: bool = False
    ) -> None:
        self._config, self._train = config, check_train(config)
        self._workspace = Workspace(out or Path("runs") / f"{config.name}-train")
        self._observer, self._anew = observer, anew
        self._log = RunLog()

    def run(self) -> TrainResult:
        """Train until a limit is reached.

        Raises:
            UsageError: the factory, the batches or the loss are wrong.
            NotFinite: the loss of a step is not finite (exit code 1); the states before it are kept.
            KeyboardInterrupt: after Ctrl-C; the same configuration goes on.
        """
        with self._workspace.acquire():
            try:
                return self._execute()
            finally:
                self._workspace.write_text("log.txt", self._log.text())

    def _execute(self) -> TrainResult:
        key = self._key()
        resumes = self._is_begun(key)
        made = make_model(self._config.model)
        module = made.to_torch(training=True) if isinstance(made, Model) else made
        program = self._record(module)
        if not resumes:  # not before the settings are known to make a step
            self._begin_anew(key)
        loop = TrainingLoop(program, make_schedule(self._train.schedule))
        loop.observer = self._send
        limits = FitLimits(self._train.epochs, self._train.steps, self._train.until)
        states = self._workspace.folder / STATES
        try:
            history = loop.run(self._batches, limits, states, resume=resumes, save_every=self._train.save_every)
        except BaseException as error:
            code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 3)
            if loop.history.records:
                self._report(self._describe(program, loop.history), str(error) or "stopped", code)
            raise
        program.write_back()
        self._write_weights(module)
        if isinstance(made, Model):
            made.take_numbers(module, module.state_dict())
        else:
            made.eval()
        training = replace(self._describe(program, history), metrics=self._evaluate(made))
        report = self._report(training)
        return TrainResult(self._workspace.folder, training, history, report.files)

    def _key(self) -> str:
        """Digest of all that a training depends on: settings, the user's files, this code and its libraries."""
        references = (self._config.model.factory, self._train.batches, self._train.loss)
        files = [Path(text.rpartition(":")[0]) for text in references if text and ".py:" in text]
        files += _files_of_onnx(Path(self._config.model.onnx)) if self._config.model.onnx else []
        settings = (self._config.model.model_dump(mode="json"), self._train.model_dump(mode="json"))
        return key_of(*settings, [digest_of_file(file) for file in files], own_code_digest(), versions())

    def _is_begun(self, key: str) -> bool:
        """Whether the folder has the states of a training of this key, from which this one goes on."""
        states = self._workspace.folder / STATES
        if self._anew or self._workspace.load(STAGE, key, str) is None or not states.exists():
            return False
        self._send(Note(f"going on from {states}"))
        return True

    def _begin_anew(self, key: str) -> None:
        """Set the files of an earlier training aside, so that none of them is taken for one of this training."""
        folder = self._workspace.folder
        own = (STATES, history_path(Path(STATES)).name, WEIGHTS, "report.json", "report.html")
        found = [folder / name for name in own if (folder / name).exists()]
        if found:
            numbers = itertools.count(1)
            aside = next(path for path in (folder / EARLIER / str(number) for number in numbers) if not path.exists())
            make_folder(aside)
            for file in found:
                file.rename(aside / file.name)
            self._send(Note(f"this training begins anew; the files of the one before are in {aside}"))
        self._workspace.save(STAGE, key, self._config.name)

    def _record(self, module: nn.Module) -> TrainProgram:
        optimizer = make_optimizer(self._train.optimizer, module)
        first = next(iter(self._batches(0)), None)
        if first is None:
            raise UsageError(f"train.batches {self._train.batches} gives no batch in the first epoch")
        program = record_step(module, make_loss(self._train), optimizer, first, max_norm=self._train.max_norm)
        for phase in program.phases:
            if phase.name != "Replay":
                self._send(PhaseEnded(phase.name, phase.seconds, phase.detail))
        return program

    def _batches(self, epoch: int) -> Any:
        """The batches of an epoch, by the user's function."""
        text = self._train.batches
        function = load_function(text, "train.batches", f"train.batches {text}")
        return call_user_code(lambda: function(epoch, **self._train.args), f"train.batches {text} raises", text)

    def _evaluate(self, trained: nn.Module | Model) -> dict[str, float]:
        text = self._train.evaluate
        if text is None:
            return {}
        function = load_function(text, "train.evaluate", f"train.evaluate {text}")
        with torch.no_grad():
            found = call_user_code(lambda: function(trained, **self._train.args), f"train.evaluate {text} raises", text)
        if not isinstance(found, Mapping):
            raise SourceError(f"train.evaluate {text} returns {type(found).__name__}, expected numbers by name")
        return {str(name): float(value) for name, value in found.items()}

    def _write_weights(self, module: nn.Module) -> None:
        """Tied parameters are stored once, as safetensors has it."""
        with replace_when_done(self._workspace.folder / WEIGHTS) as temporary:
            safetensors.torch.save_model(module, str(temporary))

    def _describe(self, program: TrainProgram, history: TrainingHistory) -> TrainingReport:
        points = tuple(LossPoint(record.step, record.loss, record.seconds) for record in history.records)
        phases = tuple(TrainingPhase(phase.name, phase.seconds, phase.detail) for phase in history.phases)
        settings = ", ".join(f"{name}={value}" for name, value in self._train.optimizer.settings.items())
        return TrainingReport(
            steps=program.steps_done,
            last_loss=history.last_loss if points else None,
            loss=self._train.loss,
            optimizer=f"{self._train.optimizer.name}({settings})",
            parameters=sum(one.numel() for one in program.module.parameters() if one.requires_grad),
            ops=len(program.graph.ops),
            phases=phases,
            losses=points,
        )

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
            files=tuple(sorted(present | {"report.json", "report.html", "log.txt"})),
            training=training,
        )
        self._workspace.write_text("report.json", report_json(report))
        self._workspace.write_text("report.html", render(page_of(report, Pictures(), self._workspace.folder)))
        return report

    def _send(self, event: Event) -> None:
        self._log.add(event)
        self._observer(event)


def _files_of_onnx(path: Path) -> list[Path]:
    """The ONNX file, and those beside it that hold its weights."""
    try:
        graph = onnx.load(path, load_external_data=False).graph
    except (OSError, DecodeError):  # as_module says what is wrong with it
        return [path]
    tensors = (*graph.initializer, *inner_tensors(graph))
    entries = [entry for tensor in tensors for entry in tensor.external_data if entry.key == "location"]
    return [path, *(path.parent / name for name in sorted({entry.value for entry in entries}))]


def make_model(model: ModelConfig) -> nn.Module | Model:
    """What a factory makes, a module of torch in training mode or a `Model` by hand; or the module of an ONNX model.

    Raises:
        SourceError: the factory raises, or returns something else.
    """
    torch.manual_seed(model.seed)
    if model.onnx is not None:
        return as_module(model.onnx, train=model.trainable or None).train()
    text = model.factory or ""
    title = f"the factory {text}"
    factory = load_function(text, "model.factory", title)
    result: Any = call_user_code(lambda: factory(**model.args), f"{title} raises", text)
    if isinstance(result, tuple) and result:
        result = result[0]
    if isinstance(result, Model):
        return result
    return plain_module(result, f"{title} returns")[0].train()


def make_loss(train: TrainConfig) -> LossFunction:
    """The loss by its name, or the user's function."""
    if train.loss == "cross-entropy":
        return nn.CrossEntropyLoss(label_smoothing=train.label_smoothing)
    if train.loss == "mse":
        return nn.MSELoss()
    return load_function(train.loss, "train.loss", f"train.loss {train.loss}")


def make_optimizer(settings: OptimizerConfig, module: nn.Module) -> optim.Optimizer:
    """torch's optimizer of the parameters that ask for a gradient."""
    asked = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        return OPTIMIZERS[settings.name](asked, **settings.settings)
    except ValueError as error:
        raise UsageError(f"train.optimizer: {error}") from None


def make_schedule(settings: ScheduleConfig | None) -> Schedule | None:
    """The schedule by its name."""
    if settings is None:
        return None
    if settings.name == "cosine":
        return lambda optimizer: CosineAnnealingLR(optimizer, settings.steps)
    return lambda optimizer: OneCycleLR(
        optimizer,
        max_lr=[group["lr"] for group in optimizer.param_groups],
        total_steps=settings.steps,
        cycle_momentum=False,
    )


OPTIMIZERS: Final[Mapping[str, Callable[..., optim.Optimizer]]] = {
    "sgd": optim.SGD,
    "adam": optim.Adam,
    "adamw": optim.AdamW,
}
