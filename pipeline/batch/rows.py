"""A row for each configuration of a batch, and for each part: data, and a table for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.table import Table
from rich.text import Text

from pipeline.batch.jobs import REPORT, PlannedRun, part_key
from pipeline.errors import UsageError
from pipeline.jobs import JobStatus, Outcome
from pipeline.parts.folder import PARTS
from pipeline.terminal.screen import Screen


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration.

    Attributes:
        name: of the run; the stem of the file if it could not be read.
        state: done, check failed, mistake, bug or lost.
        exit_code: as `onnxline run` would have it.
        why: what was wrong; empty if it is done.
        trace: the Python traceback of a bug.
        folder: of the artifacts; empty if the configuration could not be read.
        found: the figures of the run: `nodes_before`, `nodes_after`, `kept` of `structures`, `reverted` steps,
            `worst_error`, the largest absolute one of the final model on any backend, and `unsupported`, the backends
            that cannot take it; of a run in parts their sums, the worst, and `parts`, the figures of each part; empty
            if it is not done.
        known: whether an earlier batch had done it.
        parts: a row for each part of a run in parts, where it is known.
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
    parts: tuple[Row, ...] = ()


def row_of(name: str, config: str, folder: Path, outcomes: Mapping[str, Outcome], known: Collection[str]) -> Row:
    """The row of a run with its parts.

    If a run is done but its files are missing here, its node wrote them to a disk of its own.

    Args:
        name: the key of its job.
        outcomes: of all jobs, by key.
        known: the keys of those that an earlier batch had done.
    """
    outcome = outcomes[name]
    why, code = outcome.why, outcome.exit_code
    if outcome.status is JobStatus.DONE and not (folder / REPORT).is_file():
        code = UsageError.exit_code
        why = f"it was done on {outcome.where}, and its files are not here; nodes need a disk that they share"
    found = {key: value for key, value in (outcome.value or {}).items() if key not in ("report", "code")}
    figures = found.get("parts", {})
    prefix = part_key(name, "")
    jobs = {key.removeprefix(prefix): key for key in outcomes if key.startswith(prefix)}
    return Row(
        name=name,
        config=config,
        state=JobStatus.LOST if outcome.status is JobStatus.LOST else STATES.get(code, STATES[3]),
        exit_code=code,
        why=why,
        trace=outcome.trace,
        folder=str(folder),
        found=found,
        seconds=outcome.seconds,
        where=outcome.where,
        attempts=outcome.attempts,
        known=name in known,
        parts=tuple(
            row_of(jobs[part], config, folder / PARTS / part, outcomes, known)
            if part in jobs
            else Row(part_key(name, part), config, STATES[0], folder=str(folder / PARTS / part), found=figures[part])
            for part in (figures or jobs)
        ),
    )


def row_of_mistake(planned: PlannedRun, why: Exception) -> Row:
    """The row of a configuration that cannot be run at all."""
    code = getattr(why, "exit_code", UsageError.exit_code)
    return Row(planned.name, str(planned.path), STATES[code], exit_code=code, why=str(why))


STATES: Final[Mapping[int, str]] = {0: "done", 1: "check failed", 2: "mistake", 3: "bug"}
"""By exit code."""


def batch_text(rows: Sequence[Row]) -> str:
    """The output of `print_batch` as plain text."""
    out = StringIO()
    print_batch(rows, Screen(file=out, width=WIDTH, color_system=None))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def print_batch(rows: Sequence[Row], screen: Screen) -> None:
    """The table, a paragraph for each row that is not done, and how many of each there are."""
    screen.print(_table(rows))
    faults = [f"{row.config}: {row.trace}{row.why}" for row in rows if row.exit_code]
    counts = Counter(row.state for row in rows)
    totals = ", ".join(f"{count} {state}" for state, count in counts.items()) + f" of {len(rows)}"
    for text in (*faults, totals):
        for line in text.split("\n"):
            screen.print_line(line)


def _table(rows: Sequence[Row]) -> Table:
    table = Table("run", "state", "nodes", "kept", "reverted", "worst error", "seconds", box=box.SIMPLE_HEAD)
    for whole in rows:
        for row in (whole, *whole.parts):
            state = f"{row.state} before" if row.known else row.state
            if row.found.get("unsupported"):
                state += f" without {', '.join(row.found['unsupported'])}"
            tried = f", attempt {row.attempts}" if row.attempts > 1 else ""
            seconds = f"{row.seconds:.1f}" if row.attempts else ""
            name = row.name if row is whole else f"  part {row.name.rpartition('/')[2]}"
            cells = Text.assemble((state, STYLES[row.exit_code]), tried), *_result_cells(row.found), seconds
            table.add_row(name, *cells)
    return table


def _result_cells(found: Mapping[str, Any]) -> tuple[str, str, str, str]:
    if not found:
        return ("", "", "", "")
    error = found["worst_error"]
    return (
        f"{found['nodes_before']} → {found['nodes_after']}",
        f"{found['kept']}/{found['structures']}" if found["structures"] else "",
        str(found["reverted"] or ""),
        "" if error is None else f"{error:.1e}",
    )


STYLES: Final = {0: "green", 1: "yellow", 2: "red", 3: "red"}
"""By exit code."""

WIDTH: Final = 160
"""Width of the table where there is no terminal."""
