"""Run a batch: configurations become jobs, and their outcomes rows, as data, and as a table for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from os import PathLike
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.table import Table
from rich.text import Text

from passes.errors import PassError
from pipeline.argument_checks import FLAG, FUNCTION, PATH, expects, several
from pipeline.batch.configs import REPORT, PlannedRun, job_of
from pipeline.errors import OnnxlineError, UsageError
from pipeline.jobs import Job, JobExecutor, JobProgress, JobStatus, Outcome, run_jobs
from pipeline.terminal import Screen
from pipeline.workspace import Workspace, digest_of_file, own_code_digest, stamp, versions


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
            that cannot take it; empty if it is not done.
        known: whether an earlier batch had done it.
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


def row_of(planned: PlannedRun, outcome: Outcome, folder: Path, known: bool) -> Row:
    """The row of a run. If a run is done but its files are missing here, its node wrote them to a disk of its own."""
    why, code = outcome.why, outcome.exit_code
    if outcome.status is JobStatus.DONE and not (folder / REPORT).is_file():
        code = UsageError.exit_code
        why = f"it was done on {outcome.where}, and its files are not here; nodes need a disk that they share"
    found = {key: value for key, value in (outcome.value or {}).items() if key not in ("report", "code")}
    return Row(
        name=planned.name,
        config=str(planned.path),
        state=JobStatus.LOST if outcome.status is JobStatus.LOST else STATES.get(code, STATES[3]),
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
    for row in rows:
        state = f"{row.state} before" if row.known else row.state
        if row.found.get("unsupported"):
            state += f" without {', '.join(row.found['unsupported'])}"
        tried = f", attempt {row.attempts}" if row.attempts > 1 else ""
        seconds = f"{row.seconds:.1f}" if row.attempts else ""
        table.add_row(row.name, Text.assemble((state, STYLES[row.exit_code]), tried), *_result_cells(row), seconds)
    return table


def _result_cells(row: Row) -> tuple[str, str, str, str]:
    if not row.found:
        return ("", "", "", "")
    found, error = row.found, row.found["worst_error"]
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


TABLE: Final = "batch.jsonl"
"""The outcomes of jobs, for the next batch."""

TEXT: Final = "batch.txt"
"""The same for people."""


@expects(planned=several(PlannedRun, "what read_configs gives"), out=PATH, observer=FUNCTION, again=FLAG)
def run_batch(
    planned: Sequence[PlannedRun],
    out: str | PathLike[str],
    executor: JobExecutor,
    observer: Callable[[JobProgress], None] = lambda _: None,
    again: bool = False,
) -> tuple[Row, ...]:
    """Run each configuration into `out`/<name>, unless it was done before, and write both tables into `out`.

    A run that fails does not stop the others.

    Args:
        planned: from `read_configs`.
        executor: runs the jobs.
        observer: called with each run that has ended.
        again: also repeat runs that are done; each still reuses the unchanged stages in its folder.

    Returns:
        A row for each configuration, in their order.

    Raises:
        UsageError: `out` cannot be written, or another batch writes to it.
    """
    out = Path(out)
    mistakes, jobs = _jobs(planned, out)
    known: set[str] = set()

    def observe(progress: JobProgress) -> None:
        if progress.known:
            known.add(progress.outcome.key)
        observer(progress)

    def is_current(outcome: Outcome) -> bool:
        """Whether its report is unchanged, and the code of its model too."""
        same_code = all(digest_of_file(Path(file)) == digest for file, digest in outcome.value["code"].items())
        return not again and same_code and list(stamp(out / outcome.key / REPORT)) == outcome.value["report"]

    stamps = {"code of onnxline": own_code_digest(), **versions()}
    outcomes = {outcome.key: outcome for outcome in run_jobs(jobs, executor, out / TABLE, stamps, observe, is_current)}
    rows = tuple(
        mistakes[run.path]
        if run.path in mistakes
        else row_of(run, outcomes[run.name], out / run.name, run.name in known)
        for run in planned
    )
    Workspace(out).write_text(TEXT, batch_text(rows))
    return rows


def _jobs(planned: Sequence[PlannedRun], out: Path) -> tuple[dict[Path, Row], list[Job]]:
    """Rows for the configurations that cannot be run, and a job for each of the others."""
    mistakes: dict[Path, Row] = {}
    jobs = []
    for run in planned:
        try:
            if run.mistake is not None:
                raise run.mistake
            jobs.append(job_of(run, out))
        except (OnnxlineError, PassError) as error:
            mistakes[run.path] = row_of_mistake(run, error)
    return mistakes, jobs
