"""The top of the page: how the run ended and its main results, each on a card; and the tables of names, old and new."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from passes.provenance.annotations import NameMap
from passes.run.result import Status
from passes.suggest import bytes_text
from pipeline.report.html.timeline import Timeline, error_text, seconds_text, worst_of
from pipeline.report.model import Report


@dataclass(frozen=True, slots=True)
class Card:
    """One number. `tone` is good, bad, or empty where there is nothing to judge."""

    title: str
    value: str
    note: str = ""
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Headline:
    """`failure` is empty for a run that ended well."""

    name: str
    tone: str
    verdict: str
    failure: str
    cards: tuple[Card, ...]
    title: str
    """Of the page, so that one of many tabs is known."""


def headline_of(report: Report, timeline: Timeline) -> Headline:
    lost = [verdict for verdict in report.structures if not verdict.kept]
    if report.failure or report.exit_code:
        tone, verdict = "bad", f"ended early, exit code {report.exit_code}"
    elif lost:
        tone, verdict = "warn", "done, with losses"
    else:
        tone, verdict = "good", "done"
    cards = (
        *_training(report),
        *_structures(report),
        *_error(report),
        *_sizes(report, timeline),
        *_passes(report),
        *_time(report),
    )
    word = "✓ proven by structure" if report.not_compared and tone == "good" else TITLES[tone]
    word = "✓ trained" if report.training is not None and tone == "good" else word
    return Headline(report.name, tone, verdict, report.failure, cards, f"{word} · {report.name}")


TITLES: Final = {"good": "✓ proven", "warn": "△ proven, with losses", "bad": "✗ failed"}


def _training(report: Report) -> Iterator[Card]:
    training = report.training
    if training is None:
        return
    yield Card("steps", f"{training.steps:,}", f"{training.parameters:,} trained values")
    if training.last_loss is not None:
        yield Card("loss", f"{training.last_loss:.4f}", "mean of the last 50 steps")
    for name, value in training.metrics.items():
        yield Card(name, f"{value:.4g}", "of the trained model")


def _structures(report: Report) -> Iterator[Card]:
    if not report.structures:
        return
    kept, total = sum(verdict.kept for verdict in report.structures), len(report.structures)
    kinds = dict.fromkeys(verdict.kind for verdict in report.structures)
    yield Card("structures kept", f"{kept} of {total}", ", ".join(kinds), "good" if kept == total else "bad")


def _error(report: Report) -> Iterator[Card]:
    backends = report.runtime.backends if report.runtime else ()
    rows = [row for row in report.passes if row.status is Status.RAN]
    worst = worst_of([backend.errors for backend in backends] or [row.errors for row in rows])
    if worst is None:
        return
    output, errors = worst
    note = f"{errors.excess:.1%} of what is allowed" if errors.ok else f"{output}: {errors.why}"
    yield Card("worst error", error_text(errors), note, "good" if errors.ok else "bad")


def _sizes(report: Report, timeline: Timeline) -> Iterator[Card]:
    if not timeline.rows:
        return
    first, last = timeline.rows[0], timeline.final
    yield Card("nodes", f"{first.nodes:,} → {last.nodes:,}", _share(first.nodes, last.nodes))
    before, after = bytes_text(first.nbytes), bytes_text(last.nbytes)
    note = "as before" if before == after else _share(first.nbytes, last.nbytes)
    yield Card("weights", after if before == after else bytes_change(first.nbytes, last.nbytes), note)


def bytes_change(before: int, after: int) -> str:
    """`329.5 → 329.1 MiB`; both units where they differ."""
    (number, unit), end = bytes_text(before).split(), bytes_text(after)
    return f"{number if end.endswith(unit) else bytes_text(before)} → {end}"


def _share(before: int, after: int) -> str:
    share = (after - before) / before if before else 0
    return f"{share:+.{0 if abs(share) > 0.02 else 1}%}".replace("-", "−") if share else "as before"


def _passes(report: Report) -> Iterator[Card]:
    counts = {status: sum(row.status is status for row in report.passes) for status in Status}
    if not report.passes:
        return
    others = [
        f"{count} {status.replace('_', ' ')}" for status, count in counts.items() if count and status is not Status.RAN
    ]
    yield Card("passes", f"{counts[Status.RAN]} ran", ", ".join(others) or "none was taken back")


def _time(report: Report) -> Iterator[Card]:
    if report.seconds:
        stages = f"{', '.join(report.cached)} from an earlier run" if report.cached else "all stages"
        yield Card("time", seconds_text(sum(report.seconds.values())), stages)


MOST_ROWS: Final = 200
"""Rows of one table; `report.json` has all."""


@dataclass(frozen=True, slots=True)
class NameTable:
    """`rows` are pairs: the name in the source, and those in the final model; renamed ones come first."""

    title: str
    renamed: int
    gone: int
    rows: tuple[tuple[str, str], ...]

    @property
    def more(self) -> int:
        """How many names are not shown."""
        return self.renamed + self.gone - len(self.rows)


def name_tables(names: NameMap | None) -> tuple[NameTable, ...]:
    """The tables, without empty ones."""
    if names is None:
        return ()
    tables: list[NameTable] = []
    for title, changed in (("nodes", names.nodes), ("values", names.values), ("weights", names.weights)):
        rows = sorted(((old, ", ".join(news)) for old, news in changed.items()), key=lambda row: not row[1])
        gone = sum(not new for _, new in rows)
        tables.append(NameTable(title, len(rows) - gone, gone, tuple(rows[:MOST_ROWS])))
    return tuple(table for table in tables if table.rows)
