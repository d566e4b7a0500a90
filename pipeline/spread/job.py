"""A job, what came of it, and who can do many of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

__all__ = ["Job", "Outcome", "Spread", "State"]


@dataclass(frozen=True, slots=True)
class Job:
    """A call of `package.module:function` with keyword arguments, in some other process, perhaps on another machine.

    The arguments and what the function returns are plain data that JSON can hold. `key` names the job in tables and is
    unique among those that are done together. A job may be done more than once, when its process dies on the way.
    """

    key: str
    call: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


class State(StrEnum):
    """How a job ended."""

    DONE = "done"
    """The function returned."""
    FAILED = "failed"
    """The function raised."""
    LOST = "lost"
    """Its process died, in each of the attempts."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a job.

    Attributes:
        value: what the function returned; None unless it is done.
        why: what the error said, or how the process died; empty if it is done.
        trace: the Python traceback of an error that nobody raised on purpose; else empty.
        exit_code: of the error, as in `pipeline.errors`: 0 if done, 3 for a bug and for a job that was lost.
        seconds: of wall time, of the last attempt.
        where: the machine and the process, or the Ray node, that did it last.
        attempts: how often it was begun.
    """

    key: str
    status: State
    value: Any = None
    why: str = ""
    trace: str = ""
    exit_code: int = 0
    seconds: float = 0.0
    where: str = ""
    attempts: int = 1


class Spread(Protocol):
    """Does jobs somewhere else."""

    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """The outcome of each job, as they end. What still runs is stopped when the iterator is closed."""
        ...
