"""Jobs on a terminal: one progress bar over all of them, and a line for each that ended. Elsewhere only the lines."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pipeline.jobs.job import JobStatus
from pipeline.jobs.run import JobProgress

__all__ = ["JobsConsole", "line_of"]


class JobsConsole:
    """Shows jobs as they end; `show` is an observer for `run_jobs`.

    Args:
        total: how many jobs there are, as far as that is known at the beginning.
        console: standard output by default.
        quiet: no lines, only the bar; what was known before has none anyway.
    """

    def __init__(self, total: int, console: Console | None = None, quiet: bool = False) -> None:
        self._console = console or Console()
        self._quiet = quiet
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
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

    def show(self, ended: JobProgress) -> None:
        self._known += ended.known
        self._bar.update(self._task, completed=ended.done, total=ended.total, description=f"{self._known} known before")
        if not (ended.known or self._quiet):
            style = "" if ended.outcome.status is JobStatus.DONE else "red"
            self._console.print(line_of(ended), style=style, highlight=False, markup=False, soft_wrap=True)


def line_of(ended: JobProgress) -> str:
    """One line for a job that has ended."""
    outcome = ended.outcome
    more = f", attempt {outcome.attempts}" if outcome.attempts > 1 else ""
    why = f": {outcome.why}" if outcome.why else ""
    return f"[{ended.done}/{ended.total}] {outcome.key} {outcome.status}{more}, {outcome.seconds:.1f} s{why}"
