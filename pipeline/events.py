"""Events of a run while it works, their form as lines of text, and a progress bar that follows them.

Stages send events and never print; the command line, the log and the bar, on a terminal and in a notebook, render them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Self

from passes import PassRow, StructureVerdict
from passes.suggest import plural
from passes.visible import visible_line
from pipeline import events
from pipeline.errors import UsageError
from pipeline.terminal import PlainScreen, open_screen

if TYPE_CHECKING:
    from pipeline.terminal.screen import ProgressBar, Screen


@dataclass(frozen=True, slots=True)
class PartStarted:
    """The run of one part of the model begins."""

    name: str


@dataclass(frozen=True, slots=True)
class StageStarted:
    name: str


@dataclass(frozen=True, slots=True)
class StageEnded:
    """`cached`: the result is that of an earlier run, since nothing that the stage depends on has changed."""

    name: str
    seconds: float
    cached: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Progress:
    """`part` of the running stage begins; `done` of `total` parts are finished."""

    stage: str
    part: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """An epoch of a training is done. `loss` is the mean of its steps, `step` counts those of all epochs."""

    epoch: int
    epochs: int
    step: int
    loss: float
    seconds: float


@dataclass(frozen=True, slots=True)
class PassEnded:
    row: PassRow


@dataclass(frozen=True, slots=True)
class PassesEnded:
    """All passes are done, or were taken from an earlier run."""

    passes: tuple[PassRow, ...]
    structures: tuple[StructureVerdict, ...]


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a training that is done, and its time in seconds.

    Trace    records forward and backward; nothing is computed.
    Compile  puts the updates in, plans, checks the plan and binds it.
    Warmup   runs the step until storage and algorithms are settled, then takes back every state and random number.
    Capture  binds the calls to buffers of their own and records them.
    Replay   all steps so far; as an event it is sent where a training ends.
    """

    name: str
    """One of the names above."""
    seconds: float
    """Wall time."""
    detail: str = ""
    """What there is to say of the phase, in one line; empty for nothing."""


@dataclass(frozen=True, slots=True)
class Note:
    """Information for the user that does not stop the run."""

    text: str


Event = PartStarted | StageStarted | StageEnded | Progress | PassEnded | PassesEnded | Phase | EpochEnded | Note
Observer = Callable[[Event], None]


class RunLog:
    """Collects one line for each event, with the seconds since the run began."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._lines: list[str] = []

    def add(self, event: Event) -> None:
        self._lines.append(f"{time.perf_counter() - self._begun:9.3f}  {visible_line(line_of(event))}")

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def line_of(event: Event) -> str:
    """One line for an event."""
    match event:
        case PartStarted(name):
            return f"part {name} …"
        case StageStarted(name):
            return f"{name} …"
        case StageEnded(name, seconds, cached, detail):
            how = "unchanged, taken from the last run" if cached else f"{seconds:.1f} s"
            return f"{name}: {how}" + (f" ({detail})" if detail else "")
        case Progress(stage, part, done, total):
            return f"{stage}: {part} ({done + 1} of {total})"
        case EpochEnded(epoch, epochs, step, loss, seconds):
            return f"epoch {epoch} of {epochs}: mean loss {loss:.4f}, {plural(step, 'step')} done, {seconds:.1f} s"
        case PassEnded(row):
            nodes = f"{row.nodes_before} → {plural(row.nodes_after, 'node')}"
            return f"pass {row.name}: {row.status}, {nodes}" + (f" ({row.words})" if row.words else "")
        case PassesEnded(passes, structures):
            kept = sum(verdict.kept for verdict in structures)
            return f"passes: {plural(len(passes), 'row')}, {kept} of {plural(len(structures), 'structure')} kept"
        case Phase(name, seconds, detail):
            return f"phase {name}: {seconds:.3f} s" + (f" ({detail})" if detail else "")
        case Note(text):
            return f"note: {text}"


class StageBar:
    """A bar with the name of the running stage and of its part; it is gone when the run has ended.

    Args:
        console: where the bar is drawn.
        shown: whether it is drawn at all.
    """

    def __init__(self, console: Screen | PlainScreen, *, shown: bool) -> None:
        self._bar = _open_bar(console) if shown and not isinstance(console, PlainScreen) else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, event: Event) -> None:
        """Move the bar, if the event is the start of a stage or of a part of it."""
        if self._bar is None:
            return
        (task,) = self._bar.task_ids
        match event:
            case events.StageStarted(name):
                self._bar.reset(task, description=name, total=None, part="")
            case events.Progress(_, part, done, total):
                self._bar.update(task, completed=done, total=total, part=part)
            case _:
                pass


def _open_bar(console: Screen) -> ProgressBar:
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn  # not for commands without a terminal

    from pipeline.terminal.screen import ProgressBar

    bar = ProgressBar(
        TextColumn("{task.description:<10}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[part]}", markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    bar.add_task("", total=None, part="")
    return bar


@contextmanager
def show_progress(progress: bool | None, observer: Observer | None = None) -> Iterator[Observer]:
    """Show the events of the block on stderr; the yielded observer hands each event on to `observer`.

    Args:
        progress: None shows a bar on a terminal and in a notebook, where lines take its place without ipywidgets; True
            shows lines elsewhere too; False shows nothing.

    Raises:
        UsageError: `progress` is something else.
    """
    if progress is not None and not isinstance(progress, bool):
        raise UsageError(f"progress is {progress!r}, expected True, False or None")
    console = PlainScreen(stderr=True) if progress is False else open_screen(stderr=True)
    in_notebook = console.is_jupyter
    draws_bar = find_spec("ipywidgets") is not None if in_notebook else console.is_terminal
    has_bar = progress is not False and draws_bar
    has_lines = not has_bar and (progress or (in_notebook and progress is None))
    lines = console if isinstance(console, PlainScreen) else type(console)(stderr=True, force_jupyter=False)
    with StageBar(console, shown=has_bar) as bar:

        def observe(event: Event) -> None:
            bar.update(event)
            if has_lines and isinstance(event, events.StageEnded | events.Note):
                lines.print_line(line_of(event))
            if observer is not None:
                observer(event)

        yield observe


@contextmanager
def time_stage(send: Observer, name: str) -> Iterator[list[str]]:
    """Send the start of a stage and, unless the stage fails, its end with its seconds.

    Args:
        send: what is called with both events.
        name: of the stage.

    Yields:
        a list for what the line of the end says after the seconds.
    """
    send(StageStarted(name))
    details: list[str] = []
    begun = time.perf_counter()
    yield details
    send(StageEnded(name, time.perf_counter() - begun, False, ", ".join(details)))
