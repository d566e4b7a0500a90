"""Events of a run while it works, and their form as lines of text.

Stages send them and never print; the command line and the log render them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from passes import PassRow, StructureVerdict
from passes.suggest import plural
from passes.visible import visible_line


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
class PhaseEnded:
    """A phase of a train step is done: Trace, Compile, Warmup or Capture; Replay is done where a training ends."""

    name: str
    seconds: float
    detail: str


@dataclass(frozen=True, slots=True)
class Note:
    """Information for the user that does not stop the run."""

    text: str


Event = PartStarted | StageStarted | StageEnded | Progress | PassEnded | PassesEnded | PhaseEnded | EpochEnded | Note
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
        case PhaseEnded(name, seconds, detail):
            return f"phase {name}: {seconds:.3f} s" + (f" ({detail})" if detail else "")
        case Note(text):
            return f"note: {text}"
