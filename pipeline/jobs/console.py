"""The progress of jobs on a terminal: a bar over all jobs, and a line for each that ended."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from pipeline.jobs.job import JobStatus
from pipeline.jobs.run import JobProgress
from pipeline.terminal.screen import ProgressBar, Screen


class JobsConsole:
    """Shows jobs as they end; `show` is an observer for `run_jobs`.

    Args:
        total: how many jobs there are, as far as is known at the start.
        console: standard output by default.
        quiet: no lines, only the bar; jobs of an earlier run never have lines.
    """

    def __init__(self, total: int, console: Screen | None = None, quiet: bool = False) -> None:
        self._console = console or Screen()
        self._quiet = quiet
        self._bar = ProgressBar(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total)
        self._known = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bar.stop()

    def show(self, progress: JobProgress) -> None:
        self._known += progress.known
        self._bar.update(
            self._task, completed=progress.done, total=progress.total, description=f"{self._known} known before"
        )
        if not (progress.known or self._quiet):
            style = "" if progress.outcome.status is JobStatus.DONE else "red"
            self._console.print_line(line_of(progress), style)


def line_of(progress: JobProgress) -> str:
    """One line for a job that has ended."""
    outcome = progress.outcome
    more = f", attempt {outcome.attempts}" if outcome.attempts > 1 else ""
    why = f": {outcome.why}" if outcome.why else ""
    return f"[{progress.done}/{progress.total}] {outcome.key} {outcome.status}{more}, {outcome.seconds:.1f} s{why}"
