"""A row for each pass: the operators of the model after it, bytes, error, and why it did not run or was reverted.

Seconds, errors and the output with the greatest error are formatted as text here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from passes.diff.types import Diff, NodeLabel, Replacement
from passes.proof.numbers import Errors, only_compared
from passes.run.result import PassRow, Status
from passes.suggest import bytes_text
from pipeline.report.model import SOURCE, Mark, Report, diff_folder


def seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"


def error_text(errors: Errors) -> str:
    """The largest absolute error; `0` for equal tensors."""
    return f"{errors.max_abs:.1e}" if errors.max_abs else "0"


def worst_of(many: Iterable[Mapping[str, Errors]]) -> tuple[str, Errors] | None:
    """The output nearest to its limit, or farthest over it, with its errors; None if there is none."""
    pairs = [pair for errors in many for pair in only_compared(errors).items()]
    return max(pairs, key=lambda pair: (not pair[1].ok, pair[1].excess, pair[1].max_abs), default=None)


TINTS: Final = 8
"""Operators that get a colour of their own; the others share one."""

OTHERS: Final = "other"


@dataclass(frozen=True, slots=True)
class OperatorShare:
    """Nodes of one operator in a bar. `width` is in percent of the longest bar; `tint` 0 is that of all others."""

    op: str
    count: int
    tint: int
    width: float


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """One pass. `number` counts from 1; 0 is the source.

    The counts, bytes and errors of a pass that changed the model are those of its result, accepted or not; of another
    pass, those of the model before it.
    """

    number: int
    name: str
    source: str
    status: str
    reason: str
    nodes: int
    change: int
    nbytes: int
    bytes_text: str
    bytes_width: float
    error: str
    error_note: str
    seconds: str
    changed: bool
    shares: tuple[OperatorShare, ...]
    has_remarks: bool = False
    ops: tuple[tuple[str, int], ...] = ()
    lost: tuple[str, ...] = ()
    reproducer: str = ""
    diff: PassDiff | None = None

    @property
    def is_idle(self) -> bool:
        return self.status == Status.RAN and not self.changed

    @property
    def is_quiet(self) -> bool:
        """Whether the page shows the row in a group of rows that did nothing."""
        return self.is_idle and not self.has_remarks


@dataclass(frozen=True, slots=True)
class Timeline:
    rows: tuple[TimelineRow, ...] = ()
    legend: tuple[OperatorShare, ...] = ()

    @property
    def final(self) -> TimelineRow:
        """The row of the final model."""
        standing = [row for row in self.rows if not row.number or (row.changed and row.status == Status.RAN)]
        return standing[-1] if standing else self.rows[0]

    def groups(self) -> list[tuple[bool, list[TimelineRow]]]:
        """Group consecutive rows that did nothing: (is quiet, rows)."""
        groups: list[tuple[bool, list[TimelineRow]]] = []
        for row in self.rows:
            if groups and row.is_quiet and groups[-1][0]:
                groups[-1][1].append(row)
            else:
                groups.append((row.is_quiet, [row]))
        return groups


def timeline_of(report: Report, folder: Path) -> Timeline:
    """The timeline of a report; `folder` is that of the run, with the diffs."""
    marks = {mark.row: mark for mark in report.marks}
    if SOURCE not in marks:
        return Timeline()
    scale = _Scale.of(tuple(marks.values()))
    rows = [_source_row(report, marks[SOURCE], scale)]
    standing = marks[SOURCE]
    for index, row in enumerate(report.passes):
        mark = marks.get(index, standing) if row.changed else standing
        diff = read_diff(folder / diff_folder(index, row)) if row.changed else None
        rows.append(_row(index, row, mark, scale, diff))
        standing = mark if row.status is Status.RAN else standing
    return Timeline(tuple(rows), tuple(scale.legend()))


@dataclass(frozen=True, slots=True)
class _Scale:
    """What all bars share: which operators have a colour, and how much is full width."""

    tints: Mapping[str, int]
    most_nodes: int
    most_bytes: int
    totals: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, marks: Sequence[Mark]) -> _Scale:
        most: dict[str, int] = {}
        for mark in marks:
            most |= {op: max(count, most.get(op, 0)) for op, count in mark.ops.items()}
        ranked = sorted(most, key=lambda op: (-most[op], op))[:TINTS]
        nodes = max(sum(mark.ops.values()) for mark in marks)
        nbytes = max(mark.nbytes for mark in marks)
        return cls({op: index + 1 for index, op in enumerate(ranked)}, max(nodes, 1), max(nbytes, 1), most)

    def shares(self, mark: Mark) -> tuple[OperatorShare, ...]:
        counts = {op: mark.ops.get(op, 0) for op in self.tints}
        counts[OTHERS] = sum(mark.ops.values()) - sum(counts.values())
        return tuple(
            OperatorShare(op, count, self.tints.get(op, 0), round(100 * count / self.most_nodes, 3))
            for op, count in counts.items()
            if count
        )

    def legend(self) -> Iterator[OperatorShare]:
        for op, tint in self.tints.items():
            yield OperatorShare(op, self.totals[op], tint, 0)
        if len(self.totals) > len(self.tints):
            yield OperatorShare(OTHERS, 0, 0, 0)


def _source_row(report: Report, mark: Mark, scale: _Scale) -> TimelineRow:
    worst = worst_of([report.export.errors]) if report.export else None
    nodes = sum(mark.ops.values())
    return TimelineRow(
        number=0,
        name="source",
        source=f"from {report.export.origin}, opset {report.export.opset}" if report.export else "",
        status="source",
        reason="",
        nodes=nodes,
        change=0,
        nbytes=mark.nbytes,
        bytes_text=bytes_text(mark.nbytes),
        bytes_width=round(100 * mark.nbytes / scale.most_bytes, 3),
        error=error_text(worst[1]) if worst else "",
        error_note=_error_note(worst),
        seconds=seconds_text(report.seconds["export"]) if "export" in report.seconds else "",
        changed=False,
        shares=scale.shares(mark),
    )


def _row(index: int, row: PassRow, mark: Mark, scale: _Scale, diff: PassDiff | None) -> TimelineRow:
    worst = worst_of([row.errors])
    return TimelineRow(
        number=index + 1,
        name=row.name + (f" (turn {row.turn})" if row.turn > 1 else ""),
        source=row.source,
        status=row.status,
        reason=row.words,
        nodes=row.nodes_after,
        change=row.nodes_after - row.nodes_before,
        nbytes=mark.nbytes,
        bytes_text=bytes_text(mark.nbytes),
        bytes_width=round(100 * mark.nbytes / scale.most_bytes, 3),
        error=error_text(worst[1]) if worst else "",
        error_note=_error_note(worst),
        seconds=seconds_text(row.seconds),
        changed=row.changed,
        shares=scale.shares(mark),
        has_remarks=bool(row.remarks),
        ops=tuple(sorted(row.diff.items(), key=lambda pair: (-abs(pair[1]), pair[0]))),
        lost=row.lost,
        reproducer=row.reproducer,
        diff=diff,
    )


def _error_note(worst: tuple[str, Errors] | None) -> str:
    if worst is None:
        return ""
    output, errors = worst
    return f"{output}: {errors.why}" if errors.why else f"{output}: {errors.excess:.2%} of what is allowed"


MOST: Final = 30
"""Entries of a section that are shown."""

MOST_NODES: Final = 12
"""Nodes of one side of an entry that are shown."""

LONGEST: Final = 300
"""Characters of one text."""


@dataclass(frozen=True, slots=True)
class DiffEntry:
    """Either removed and added nodes, or a sentence."""

    removed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class DiffSection:
    """`more` is the number of entries that are left out."""

    title: str
    entries: tuple[DiffEntry, ...]
    more: int


@dataclass(frozen=True, slots=True)
class PassDiff:
    summary: str
    sections: tuple[DiffSection, ...]


def read_diff(folder: Path) -> PassDiff | None:
    """The diff in `folder`; None if there is none that can be read."""
    try:
        data = json.loads((folder / "diff.json").read_text(encoding="utf-8"))
        diff = TypeAdapter(Diff).validate_python({field.name: data[field.name] for field in fields(Diff)})
        return PassDiff(str(data["summary"]), tuple(_sections(diff)))
    except (OSError, ValueError, LookupError, TypeError, RecursionError, ValidationError):
        return None


def _sections(diff: Diff) -> Iterator[DiffSection]:
    for name, title in TITLES.items():
        entries: Sequence[object] = getattr(diff, name)
        if entries:
            yield DiffSection(title, tuple(map(_entry, entries[:MOST])), max(0, len(entries) - MOST))


def _entry(change: object) -> DiffEntry:
    if isinstance(change, Replacement):
        return DiffEntry(
            _node_texts(change.removed),
            _node_texts((*change.added, *(f"stored constant {name}" for name in change.stored))),
        )
    return DiffEntry(text=_short(str(change)))


def _node_texts(nodes: Sequence[NodeLabel | str]) -> tuple[str, ...]:
    texts = [_short(str(node)) for node in nodes[:MOST_NODES]]
    return (*texts, f"{len(nodes) - MOST_NODES} more") if len(nodes) > MOST_NODES else tuple(texts)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


TITLES: Final = {
    "header": "model",
    "replaced": "nodes",
    "attributes": "attributes",
    "rewired": "inputs of nodes",
    "initializers": "weights and constants",
    "quantized": "quantized",
    "requantized": "quantized otherwise",
    "shared": "which of equal values is read",
}
"""Field of `Diff` → title of its section."""
