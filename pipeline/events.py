"""What a run says while it works. Stages send events and never print; the command line and the log render them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from passes import PassRow, StructureVerdict

__all__ = ["Event", "Note", "Observer", "Optimized", "PassEnded", "Progress", "StageEnded", "StageStarted"]


@dataclass(frozen=True, slots=True)
class StageStarted:
    name: str


@dataclass(frozen=True, slots=True)
class StageEnded:
    """`cached`: nothing that this stage depends on has changed since the last run, so it was not done again."""

    name: str
    seconds: float
    cached: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` parts of the running stage are behind us; `part` begins now."""

    stage: str
    part: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class PassEnded:
    row: PassRow


@dataclass(frozen=True, slots=True)
class Optimized:
    """All passes are done, or known from the last run."""

    passes: tuple[PassRow, ...]
    structures: tuple[StructureVerdict, ...]


@dataclass(frozen=True, slots=True)
class Note:
    """Something that the user should know and that stops nothing."""

    text: str


Event = StageStarted | StageEnded | Progress | PassEnded | Optimized | Note
Observer = Callable[[Event], None]
