"""The console of a run: a progress bar on a terminal, plain lines elsewhere; then a table of the passes, what failed,
and where the files are. Names are never cut, so they can be copied into a `skip` list."""

from __future__ import annotations

import contextlib
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from passes.proof.numbers import only_compared
from passes.run.result import PassRow, Status, StructureVerdict, author_of_loss
from passes.suggest import bytes_text, join_first, milliseconds_text, plural
from passes.visible import visible_line
from pipeline import events
from pipeline.errors import UsageError
from pipeline.events import StageBar, line_of
from pipeline.terminal import PlainScreen, Words, open_screen

if TYPE_CHECKING:
    from pipeline.report import BackendReport
    from pipeline.result import RunResult
    from pipeline.terminal.screen import Screen

STYLES: Final = {
    Status.RAN: "green",
    Status.SKIPPED: "dim",
    Status.REVERTED: "yellow",
    Status.FAILED: "red",
    Status.CRASHED: "red",
    Status.TIMED_OUT: "red",
}

LOG_WIDTH: Final = 120
"""Columns where the output is no terminal."""

PAGE: Final = "report.html"

NAMED: Final = 3
"""Lost structures, or skipped steps, that one line lists."""


class RunConsole:
    """Shows the progress and the result of a run.

    Args:
        verbose: show every step and every structure, not only what changed or failed.
        quiet: show nothing.
        keep: structures that the run keeps; the advice on lost structures adds to them.

    Raises:
        UsageError: `verbose` and `quiet` are both set.
    """

    def __init__(
        self,
        console: Screen | PlainScreen | None = None,
        *,
        verbose: bool = False,
        quiet: bool = False,
        keep: Sequence[str] = (),
    ) -> None:
        if verbose and quiet:
            raise UsageError(
                "--verbose shows every step, and --quiet and --json show none; leave --verbose or them out"
            )
        self._console = console or open_screen(quiet=quiet)
        self._verbose, self._keep = verbose, keep
        self._bar = StageBar(self._console, shown=self._console.is_terminal and not quiet)
        self._passes_ended: events.PassesEnded | None = None

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bar.__exit__(kind, error, tb)

    def show(self, event: events.Event) -> None:
        """Show one event of a run."""
        self._bar.update(event)
        match event:
            case events.EpochEnded():
                self.line(line_of(event))
            case events.PartStarted(name):
                self.line(f"part {name}", "bold")
            case events.PassesEnded():
                self._passes_ended = event
            case events.StageEnded() | events.Phase() | events.Note():
                self.line(line_of(event))
            case events.PassEnded(row) if self._verbose and row.status.counts_as_reverted:
                self.line(line_of(event), STYLES[row.status])
            case _:
                pass

    def line(self, text: Words, style: str = "") -> None:
        """Print one line."""
        self._console.print_line(text, style)

    def show_passes(self, folder: Path | None = None) -> None:
        """Print what the passes did and which structures are left; of a failed run, as far as it came."""
        if self._passes_ended is None:
            return
        rows, structures = self._passes_ended.passes, self._passes_ended.structures
        shown = [row for row in rows if self._verbose or row.changed or row.remarks or row.status.counts_as_reverted]
        width = LOG_WIDTH if isinstance(self._console, PlainScreen) else self._console.width
        for line in _table(shown, width, wraps=self._console.is_terminal):
            self.line(line)
        if len(shown) < len(rows):
            self.line(_rest([row for row in rows if row not in shown]), "dim")
        for line in _structure_lines(structures, self._verbose):
            self.line(line)
        for row in rows:
            if row.status.counts_as_reverted:
                self.line(f"{row.status.replace('_', ' ')}: {row.name}: {row.reason}", STYLES[row.status])
                if row.reproducer and folder is not None:
                    from pipeline.workspace import REPRODUCERS  # with pydantic, which `optimize` does not need

                    self.line(f"  the smallest model that brings it down: {folder / REPRODUCERS / row.reproducer}")
        for line in _lost_lines(structures, rows, self._keep):
            self.line(line, "red")

    def conclude(self, result: RunResult) -> None:
        """Print what the passes did, how the final model runs, and where the files are."""
        from pipeline.parts.result import PartsResult  # with the models of a report, which `optimize` needs none of

        if isinstance(result, PartsResult):
            for name, part in result.parts.items():
                self.line(f"part {name}", "bold")
                self._passes_ended = events.PassesEnded(part.passes, part.structures)
                self._show_result(part)
            for chain in result.chain:
                self.line(f"chain: {chain.sentence}")
        else:
            self._show_result(result)
        if result.cached:
            self.line(f"not done again, since nothing changed: {', '.join(result.cached)}")
        self.show_files("files", result.folder, result.report.files)

    def _show_result(self, result: RunResult) -> None:
        self.show_passes(result.folder)
        if result.optimize.sensitivity.margin < float("inf"):
            self.line(
                f"proof: a zeroed weight of a kept structure moves the values there by at least "
                f"{result.optimize.sensitivity.margin:.0f} times the tolerance"
            )
        for backend in result.runtime.backends:
            self.line(_backend_line(backend, result.export.origin))
        if result.runtime.ops:
            arena = bytes_text(result.runtime.arena_bytes)
            packed = result.runtime.packed_bytes
            place = "" if result.runtime.device == "cpu" else f" on {result.runtime.device}"
            more = f", {bytes_text(packed)} of packed weights" if packed else ""
            native = sum(backend.native_calls for backend in result.runtime.backends)
            in_cpp = f" ({native} in C++, built by this machine's compiler)" if native else ""
            self.line(f"plan: {plural(result.runtime.ops, 'kernel call')}{in_cpp}, one arena of {arena}{place}{more}")
        for sentence in result.export.lifted:
            self.line(sentence)

    def show_failure(self, folder: Path, since: float) -> None:
        """Print the results of a run that failed, and the files that it wrote: those changed `since` it began."""
        self.show_passes(folder)
        with contextlib.suppress(OSError):  # the folder itself may be what is wrong
            files = sorted(file for file in folder.glob("[!.]*") if file.is_file() and file.stat().st_mtime >= since)
            if files:
                self.show_files("files so far", folder, [file.name for file in files])

    def show_files(self, title: str, folder: Path, names: Sequence[str]) -> None:
        """Print the names, and the page on a line of its own, where a terminal makes a link of it."""
        self.line(f"{title}: {folder}/ ({', '.join(names)})")
        if PAGE in names:
            self.line("open in a browser:")
            self.line(f"  {folder / PAGE}")


def _table(rows: Sequence[PassRow], width: int, *, wraps: bool) -> Iterator[Words]:
    """A heading and a line for each row; a name that is too long for its column gets its own line."""
    if not rows:
        return
    table = [("pass", "status", "nodes", "seconds", "max error"), *map(_cells, rows)]
    widths = [max(len(cells[column]) for cells in table) for column in range(5)]
    figures = sum(widths[1:]) + 2 * len(widths[1:])
    names = max(min(widths[0], width - figures), 12)
    for row, cells in zip((None, *rows), table, strict=True):
        style, other = (STYLES[row.status], "") if row else ("bold", "bold")
        name = f"{cells[0]:<{names}}"
        if len(cells[0]) > names:
            yield [(name, other)]
            name = " " * names
        pads = "<", "<", ">", ">"
        texts = [f"  {cell:{pad}{widths[at]}}" for at, (cell, pad) in enumerate(zip(cells[1:], pads, strict=True), 1)]
        yield [(name, other), (texts[0], style), ("".join(texts[1:]).rstrip(), other)]
        if row and row.words and not row.status.counts_as_reverted:  # those are explained below the table
            reason = textwrap.wrap(row.words, max(width - 4, 1), break_long_words=False, break_on_hyphens=False)
            yield from ([(f"    {words}", "dim")] for words in (reason if wraps else [row.words]))


def _cells(row: PassRow) -> tuple[str, ...]:
    error = max((errors.max_abs for errors in only_compared(row.errors).values()), default=None)
    return (
        visible_line(row.name),
        row.status.replace("_", " "),
        f"{row.nodes_before} → {row.nodes_after}" if row.changed else str(row.nodes_before),
        f"{row.seconds:.2f}",
        "" if error is None else f"{error:.1e}",
    )


def _rest(rows: Sequence[PassRow]) -> str:
    """One line for the rows that are not shown."""
    skipped = [row.name for row in rows if row.status is Status.SKIPPED]
    idle = len(rows) - len(skipped)
    parts = [f"{plural(idle, 'step')} had nothing to do"] if idle else []
    if skipped:
        parts.append(f"{join_first(skipped, NAMED)} {'was' if len(skipped) == 1 else 'were'} skipped")
    return f"{', '.join(parts)} (--verbose shows all)"


def _structure_lines(structures: Sequence[StructureVerdict], verbose: bool) -> Iterator[str]:
    if not structures:
        yield "no separate Q, K and V in this model"
    kept = Counter(verdict.kind for verdict in structures if verdict.kept)
    for kind, count in Counter(verdict.kind for verdict in structures).items():
        yield f"{kind}: {kept[kind]} of {count} kept"
        for verdict in structures if verbose else ():
            if verdict.kind == kind:
                broken = f", broken by {verdict.broken_by}" if verdict.broken_by else ""
                yield f"  {verdict.name}: {'kept' if verdict.kept else 'lost'}{broken}"


def _lost_lines(structures: Sequence[StructureVerdict], rows: Sequence[PassRow], keep: Sequence[str]) -> Iterator[str]:
    """The structures that the final model lost, the passes that broke them, and the option that keeps them."""
    lost = [verdict for verdict in structures if not verdict.kept]
    by_author = defaultdict[tuple[str, str], list[str]](list)
    for verdict in lost:
        by_author[verdict.kind, author_of_loss(verdict, rows)].append(verdict.name)
    for (kind, culprit), names in by_author.items():
        yield f"lost: {kind} {join_first(names, NAMED)}" + (f", by {culprit}" if culprit else "")
    if lost:
        kinds = dict.fromkeys((*keep, *(verdict.kind for verdict in lost)))
        yield f"  to keep {'it' if len(lost) == 1 else 'them'}, run again with --keep {','.join(kinds)}"


def _backend_line(backend: BackendReport, origin: str) -> str:
    if backend.shortfall:
        return f"{backend.name}: {backend.shortfall}"
    worst = max((errors.max_abs for errors in only_compared(backend.errors).values()), default=None)
    remarks = "; ".join(filter(None, (backend.remark, backend.excuse)))
    remark = f" ({remarks})" if remarks else ""
    time = milliseconds_text(backend.seconds)
    error = "no output compared" if worst is None else f"max abs error {worst:.2e} against {origin}"
    return f"{backend.name}: {time} a run, {error}{remark}"
