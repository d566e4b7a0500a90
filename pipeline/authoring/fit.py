"""The loop over a program's steps: it counts, records the losses, follows a schedule, saves, stops and goes on.

Ctrl-C is seen between two steps: the step at hand is finished, the states are saved, and KeyboardInterrupt is raised.
To go on, the loop asks for the same batches again and leaves out those that were trained on, so batches have to come
in the same order each time: draw them by a generator of their own. A script may call `run` several times, one for each
stage of its training. Each stage that is to go on has a path of its own; the history next to its states says at which
step the stage began: a stage goes on only from its own states.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any, Final, TypeAlias

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from passes.suggest import plural
from passes.visible import Table, TableResult
from passes.weights.files import replace_when_done, write_errors
from pipeline.authoring.tensors import typed
from pipeline.errors import UsageError
from pipeline.events import EpochEnded, Observer, Phase, Progress
from pipeline.report.model import StepRecord
from pipeline.training import NotFinite, Snapshot, TrainProgram
from pipeline.training.batch import Batch
from pipeline.training.state_dict import check_place

Batches: TypeAlias = Iterable[Any] | Callable[[int], Iterable[Any]]
"""The batches of one epoch, which can be iterated again; or a function from the epoch, counted from 0, to them."""

Schedule: TypeAlias = Callable[[Optimizer], LRScheduler]
"""Makes a scheduler of torch, which takes a step after each step of the training."""

WINDOW: Final = 50
"""Steps of which `until` looks at the mean loss."""

SECONDS: Final = 0.1
"""Between two updates of the progress bar."""


@dataclass(frozen=True, slots=True)
class TrainingHistory(TableResult):
    """The steps of a training, also those before it was stopped and taken up again, and the phases of its program."""

    records: tuple[StepRecord, ...] = ()
    """The loss and the time of each step, in order."""
    phases: tuple[Phase, ...] = ()
    """The phases of the program, in order, with their seconds."""

    def __repr__(self) -> str:
        losses = f", loss {self.losses[0]:.4g} → {self.last_loss:.4g}" if self.records else ""
        return f"TrainingHistory({plural(len(self.records), 'step')}{losses})"

    def tables(self) -> Iterator[Table]:
        rows = [("steps", str(len(self.records)))]
        if self.records:
            rows += [("first loss", f"{self.losses[0]:.4g}"), ("last loss", f"{self.last_loss:.4g}")]
        yield Table("training", rows)
        yield Table("phases", [(phase.name, f"{phase.seconds:.2f} s") for phase in self.phases])

    @property
    def losses(self) -> tuple[float, ...]:
        return tuple(record.loss for record in self.records)

    @property
    def last_loss(self) -> float:
        """The mean loss of the last 50 steps.

        Raises:
            UsageError: no step was done.
        """
        if not self.records:
            raise UsageError("the history has no step; expected a training that did one")
        return fmean(self.losses[-WINDOW:])


@typed
@dataclass(frozen=True, slots=True)
class FitLimits:
    """When a training ends: after epochs, after steps, or when the mean loss of the last 50 steps is below `until`."""

    epochs: int = 1
    """How often the training goes through the batches, 1 or more."""
    steps: int | None = None
    """The most steps; None for no such limit."""
    until: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("epochs", self.epochs), ("steps", self.steps)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UsageError(f"fit: found {name}={value!r}, expected an integer above zero")

    def are_reached(self, steps: int, records: Sequence[StepRecord]) -> bool:
        """Whether a training ends after `steps` steps with these records.

        Args:
            steps: how many steps were done.
            records: the records of these steps, the last of them last.
        """
        if self.steps is not None and steps >= self.steps:
            return True
        if self.until is None or len(records) < WINDOW:
            return False
        return fmean(record.loss for record in records[-WINDOW:]) < self.until


@typed
class TrainingLoop:
    """A training with `program`, of which there may be several calls of `run` in a row."""

    def __init__(
        self,
        program: TrainProgram,
        schedule: Schedule | None = None,
        prepare: Callable[[Any], Batch] = lambda batch: batch,
    ) -> None:
        """`prepare` makes of a batch what the program takes."""
        self._program, self._prepare = program, prepare
        self.observer: Observer = lambda _: None
        """Is called with the events of the next `run`."""
        self._scheduler = None if schedule is None else schedule(program.optimizer)
        self._records: list[StepRecord] = []
        self._done = 0
        self._begun = 0
        """Steps that the program had done when the last `run` began."""
        self._ahead = 0
        """Batches that this `run` leaves out, since they were trained on before the training was stopped."""
        self._resumed: Snapshot | None = None
        self._seconds, self._shown = 0.0, 0.0

    @property
    def history(self) -> TrainingHistory:
        """The steps so far, of all calls."""
        before = tuple(phase for phase in self._program.phases if phase.name != "Replay")
        return TrainingHistory(tuple(self._records), (*before, self._replay))

    @typed
    def run(
        self,
        batches: Batches,
        limits: FitLimits,
        path: Path | None = None,
        *,
        resume: bool = False,
        save_every: int | None = None,
    ) -> TrainingHistory:
        """Train until a limit is reached.

        Args:
            batches: as in `Model.fit`.
            limits: when the training ends.
            path: the states are saved there when the training ends or is stopped, and after each epoch; the history
                lies next to it.
            resume: go on from the states in `path`, if there is such a file. States that have reached a limit already
                are not trained further.
            save_every: the number of steps after which the states are saved too.

        Raises:
            UsageError: the batches do not fit, or come once although there are more epochs; or the states in `path` are
                those of another stage of the training.
            NotFinite: the loss of a step is not finite; the last good states are saved.
            DataError: a batch had an index out of range, which a device reports late (a UsageError too).
            KeyboardInterrupt: after Ctrl-C; the states are saved.
        """
        _refuse_batches(batches, limits.epochs)
        _refuse_saving(path, save_every, resume=resume)
        first, first_record = self._done, len(self._records)
        self._begun = self._program.steps_done
        if path is not None and resume:
            self._take_up(path)
        with _interrupts() as interrupt:

            def is_over() -> bool:
                return interrupt.is_set() or limits.are_reached(self._done - first, self._records[first_record:])

            try:
                for epoch in range(limits.epochs):
                    if not is_over():
                        self._run_epoch(batches, epoch, limits.epochs, is_over, path, save_every)
                self._program.synchronize()  # a device has not said yet what was wrong with the last batches
            except NotFinite:
                self._save(path)
                raise
            finally:
                self._end_leaving_out()
            self._save(path)
        self.observer(self._replay)
        if interrupt.is_set():
            raise KeyboardInterrupt
        return self.history

    def _run_epoch(
        self,
        batches: Batches,
        epoch: int,
        epochs: int,
        is_over: Callable[[], bool],
        path: Path | None,
        save_every: int | None,
    ) -> None:
        begun, first = time.perf_counter(), len(self._records)
        for batch in self._batches_of(batches, epoch, path):
            if is_over():
                return
            self._step(batch)
            self._show(epoch, epochs)
            if save_every is not None and self._done % save_every == 0:
                self._save(path)
        if len(self._records) > first:
            losses = [record.loss for record in self._records[first:]]
            self.observer(EpochEnded(epoch + 1, epochs, self._done, fmean(losses), time.perf_counter() - begun))
            if epoch + 1 < epochs:  # the last states of all are saved by the caller
                self._save(path)

    def _batches_of(self, batches: Batches, epoch: int, path: Path | None) -> Iterator[Any]:
        """The batches of an epoch that were not trained on before; where one fails, the steps so far are saved."""
        given = iter(batches(epoch) if callable(batches) else batches)
        left_out = 0
        while self._ahead and next(given, None) is not None:
            self._ahead, left_out = self._ahead - 1, left_out + 1
        if not self._ahead:
            self._end_leaving_out()
        is_empty, end = not left_out, object()
        while True:
            try:
                batch = next(given, end)
            except Exception:
                self._save(path)
                raise
            if batch is end:
                break
            is_empty = False
            yield batch
        if is_empty:
            raise UsageError(f"fit: epoch {epoch + 1} has no batch; expected one at least")

    def _end_leaving_out(self) -> None:
        """Restore the resumed states after their batches were skipped, which may have advanced torch's generator."""
        self._ahead = 0
        if self._resumed is not None:
            self._program.restore(self._resumed)
            self._resumed = None

    def _step(self, batch: Any) -> None:
        start = time.perf_counter()
        loss = self._program.step(self._prepare(batch)).item()
        self._seconds += time.perf_counter() - start
        self._done += 1
        self._records.append(StepRecord(self._done, loss, self._seconds))
        self._advance_schedule()

    def _advance_schedule(self) -> None:
        if self._scheduler is None:
            return
        try:
            self._scheduler.step()
        except ValueError as error:  # one that ends, such as OneCycleLR
            raise UsageError(f"the schedule refuses step {self._done}: {error}") from None

    def _show(self, epoch: int, epochs: int) -> None:
        now = time.perf_counter()
        if now - self._shown > SECONDS:
            self._shown = now
            part = f"epoch {epoch + 1} of {epochs}, step {self._done}, loss {self._records[-1].loss:.4f}"
            self.observer(Progress("Replay", part, epoch, epochs))

    @property
    def _replay(self) -> Phase:
        return Phase("Replay", self._seconds, plural(self._done, "step"))

    def _save(self, path: Path | None) -> None:
        """Write the history, then the states: a history that is longer than the states is cut when it is read."""
        if path is None:
            return
        rows = [[record.step, record.loss, record.seconds] for record in self._records]
        with write_errors(history_path(path)), replace_when_done(history_path(path)) as temporary:
            Path(temporary).write_text(json.dumps({"begun": self._begun, "steps": rows}) + "\n", encoding="utf-8")
        self._program.save(path)

    def _take_up(self, path: Path) -> None:
        """Go back to the states in `path`, and leave out the batches of the steps that they are ahead."""
        if not path.exists():
            return
        before = self._begun
        begun, records = _read_history(path)
        if begun not in (None, before):
            raise UsageError(
                f"fit: {path} has states of a fit that began at step {begun}, and this one begins at step {before}; "
                "expected a path of its own for each fit that is to go on, and a model that is compiled anew"
            )
        self._program.load(path)
        ahead = self._program.steps_done - before
        if ahead < 0:
            raise UsageError(
                f"{path} is of step {before + ahead}, and the program did {before} steps already; begin anew"
            )
        self._done, self._ahead = self._done + ahead, ahead
        self._records = [record for record in records if record.step <= self._done]
        self._seconds = self._records[-1].seconds if self._records else 0.0
        for _ in range(ahead):
            self._advance_schedule()
        self._follow_optimizer()
        self._resumed = self._program.snapshot()

    def _follow_optimizer(self) -> None:
        """Give the program the learning rates of its optimizer, and not those of the step that was saved last."""
        found = self._program.state_dict()["optimizer"]
        for group, own in zip(found["param_groups"], self._program.optimizer.param_groups, strict=True):
            group["lr"] = float(own["lr"])
        self._program.load_state_dict({"optimizer": found})


def _refuse_batches(batches: object, epochs: int) -> None:
    if callable(batches):
        return
    if not isinstance(batches, Iterable):
        raise UsageError(
            f"fit: found {type(batches).__name__}, expected batches, or a function from an epoch to batches"
        )
    if isinstance(batches, Iterator) and epochs > 1:
        raise UsageError(
            f"fit: found an iterator, which gives its batches once, for {epochs} epochs; expected a list, a "
            "DataLoader, or a function from the number of an epoch to its batches"
        )


def _refuse_saving(path: Path | None, save_every: int | None, *, resume: bool) -> None:
    if save_every is not None and (not isinstance(save_every, int) or save_every < 1):
        raise UsageError(f"fit: found save_every={save_every!r}, expected an integer above zero")
    if path is not None:
        check_place(path)
        return
    for name, is_asked in (("resume", resume), ("save_every", save_every is not None)):
        if is_asked:
            raise UsageError(f"fit: found {name} without a path; expected path= with a file for the states")


def history_path(path: Path) -> Path:
    """The file of the history, next to the states in `path`."""
    return path.with_name(f"{path.name}.history.json")


def _read_history(path: Path) -> tuple[int | None, list[StepRecord]]:
    """The step at which the stage of the states began, and the history; None and no step where there is no file."""
    file = history_path(path)
    if not file.is_file():
        return None, []
    found = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(found, list):  # of a release that did not write where a stage began
        found = {"begun": None, "steps": found}
    records = [StepRecord(int(step), float(loss), float(seconds)) for step, loss, seconds in found["steps"]]
    return found["begun"], records


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Set after the first Ctrl-C; the second one stops at once. Elsewhere than in the main thread there is none."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.getsignal(signal.SIGINT)

    def remember(_: int, __: FrameType | None) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, remember)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
