"""Events on a terminal: a progress bar with the stage's name; elsewhere plain lines. Then the tables."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from passes.result import PassRow, Status, StructureVerdict
from pipeline import events
from pipeline.log import line_of
from pipeline.result import RunResult

__all__ = ["Screen"]

STYLES = {
    Status.RAN: "green",
    Status.SKIPPED: "dim",
    Status.REVERTED: "yellow",
    Status.FAILED: "red",
    Status.CRASHED: "red",
    Status.TIMED_OUT: "red",
}


class Screen:
    """Shows a run as it goes on."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._bar = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(),
            TextColumn("{task.fields[part]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, part="")
        self._optimized: events.Optimized | None = None

    @property
    def _wide(self) -> Console:
        """In a log file a table is as wide as it needs to be; a terminal knows its width."""
        return self._console if self._console.is_terminal else Console(width=160, file=self._console.file)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bar.stop()

    def show(self, event: events.Event) -> None:
        match event:
            case events.StageStarted(name):
                self._bar.reset(self._task, description=name, total=None, part="")
            case events.Progress(_, part, done, total):
                self._bar.update(self._task, completed=done, total=total, part=part)
            case events.Optimized():
                self._optimized = event
            case events.StageEnded() | events.Note():
                self._console.print(line_of(event), highlight=False, soft_wrap=True)
            case events.PassEnded(row) if row.status.counts_as_reverted:
                self._console.print(line_of(event), highlight=False, style=STYLES[row.status], soft_wrap=True)
            case _:
                pass

    def tables(self) -> None:
        """The table of the passes and the verdict of each structure, as far as the run came."""
        if self._optimized is None:
            return
        structures = self._optimized.structures
        self._wide.print(_pass_table(self._optimized.passes))
        self._wide.print(_structure_table(structures) if structures else "no separate Q, K and V in this model")

    def conclude(self, result: RunResult) -> None:
        """The tables, how the final model runs, and where the files are."""
        self.tables()
        wide = self._wide
        if result.optimize.sensitivity.margin < float("inf"):
            wide.print(
                f"proof: a zeroed weight of a kept structure moves the values there by at least "
                f"{result.optimize.sensitivity.margin:.0f} times the tolerance",
                highlight=False,
            )
        for backend in result.runtime.backends:
            if backend.shortfall:
                wide.print(f"{backend.name}: {backend.shortfall}", highlight=False, soft_wrap=True)
                continue
            worst = max((errors.max_abs for errors in backend.errors.values()), default=0.0)
            wide.print(
                f"{backend.name}: max abs error {worst:.2e} against {result.export.origin}, "
                f"{backend.seconds:.2f} s a run",
                highlight=False,
            )
        if result.runtime.ops:
            mib = result.runtime.arena_bytes / 2**20
            wide.print(f"plan: {result.runtime.ops} kernel calls, one arena of {mib:.1f} MiB", highlight=False)
        if result.cached:
            wide.print(f"not done again, since nothing changed: {', '.join(result.cached)}", highlight=False)
        wide.print(f"files: {result.folder}/ ({', '.join(result.report.files)})", highlight=False, soft_wrap=True)


def _pass_table(rows: Iterable[PassRow]) -> Table:
    table = Table("pass", "source", "status", "nodes", "seconds", "max error", "why", title="passes")
    for row in rows:
        error = max((errors.max_abs for errors in row.errors.values()), default=None)
        table.add_row(
            row.name,
            row.source,
            f"[{STYLES[row.status]}]{row.status}[/]",
            f"{row.nodes_before} → {row.nodes_after}" if row.changed else str(row.nodes_before),
            f"{row.seconds:.2f}",
            "" if error is None else f"{error:.1e}",
            row.reason or ("" if row.changed or row.status is not Status.RAN else "nothing to do"),
        )
    return table


def _structure_table(verdicts: Iterable[StructureVerdict]) -> Table:
    table = Table("structure", "where", "kept", "broken by", title="structures")
    for verdict in verdicts:
        kept = "[green]yes[/]" if verdict.kept else "[red]no[/]"
        table.add_row(verdict.kind, verdict.name, kept, verdict.broken_by or "")
    return table
