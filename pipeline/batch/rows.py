"""What became of each configuration of a batch, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pipeline.batch.configs import Planned
from pipeline.batch.work import REPORT
from pipeline.errors import UsageError
from pipeline.spread import Outcome, State

__all__ = ["Row", "row_of", "row_of_mistake"]


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration.

    Attributes:
        name: of the run; the stem of the file, where that could not be read.
        state: done, check failed, mistake, bug or lost.
        exit_code: as `onnxline run` would have it.
        why: what was wrong; empty if it is done.
        trace: the Python traceback of a bug.
        folder: of the artifacts; of a configuration that could not be read, empty.
        found: what the run came to: `nodes_before`, `nodes_after`, `kept` of `structures`, `reverted` steps,
            `worst_error`, the largest absolute one of the final model on any backend, and `unsupported`, the backends
            that cannot take it; empty if it is not done.
        known: whether it was done in an earlier batch.
    """

    name: str
    config: str
    state: str
    exit_code: int = 0
    why: str = ""
    trace: str = ""
    folder: str = ""
    found: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    where: str = ""
    attempts: int = 0
    known: bool = False


def row_of(planned: Planned, outcome: Outcome, folder: Path, known: bool) -> Row:
    """The row of a run; one that is done and whose files nobody sees here has made them on a disk of its own."""
    why, code = outcome.why, outcome.exit_code
    if outcome.status is State.DONE and not (folder / REPORT).is_file():
        code = UsageError.exit_code
        why = f"it was done on {outcome.where}, and its files are not here; nodes need a disk that they share"
    found = {key: value for key, value in (outcome.value or {}).items() if key not in ("report", "code")}
    return Row(
        name=planned.name,
        config=str(planned.path),
        state=State.LOST if outcome.status is State.LOST else STATES.get(code, STATES[3]),
        exit_code=code,
        why=why,
        trace=outcome.trace,
        folder=str(folder),
        found=found,
        seconds=outcome.seconds,
        where=outcome.where,
        attempts=outcome.attempts,
        known=known,
    )


def row_of_mistake(planned: Planned, why: Exception) -> Row:
    """The row of a configuration that cannot be run at all."""
    code = getattr(why, "exit_code", UsageError.exit_code)
    return Row(planned.name, str(planned.path), STATES[code], exit_code=code, why=str(why))


STATES: Final[Mapping[int, str]] = {0: "done", 1: "check failed", 2: "mistake", 3: "bug"}
"""By exit code."""
