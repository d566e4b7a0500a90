"""The table of the benchmark, and what in it breaks a bound."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from benchmarks.families.measure import Outcome
from benchmarks.families.record import Record
from benchmarks.families.table import Family
from pipeline.workspace import versions

MOST_EXTRA: Final = 2.0
"""Nodes per instance that keeping may cost."""

Rows = Sequence[tuple[Family, Record]]


def breaches(rows: Rows) -> list[str]:
    """Every way in which a family is not as it should be; empty when all bounds hold."""
    return [f"{family.name}: {what}" for family, record in rows for what in _breaches(family, record)]


def _breaches(family: Family, record: Record) -> Iterator[str]:
    if record.why_not:
        if family.exports:
            yield f"does not export: {record.why_not}"
        return
    detection = record.detection
    if detection is None:
        yield "not measured"
        return
    if detection.missed:
        yield f"missed {', '.join(detection.missed)}"
    if detection.invented:
        yield f"found what torch has not: {'; '.join(detection.invented)}"
    if detection.lost:
        yield f"the checker misses {', '.join(detection.lost)} in the model as exported"
    if bool(detection.expected) == bool(family.without):
        yield f"torch ran {detection.expected} triples; the row says {family.without or 'there are some'}"
    for name, outcome in record.outcomes.items():
        if outcome.kept.lost:
            yield f"{name} loses {outcome.kept.lost} that were kept"
        if outcome.by_name.lost:
            yield f"{name}: skipping by name loses {outcome.by_name.lost}, so there is nothing to compare with"
        if outcome.extra > MOST_EXTRA:
            yield f"{name}: keeping costs {outcome.extra:.1f} nodes per instance, expected {MOST_EXTRA:g} at most"


def markdown(rows: Rows, optimizers: Sequence[str], command: str) -> str:
    head = ("family", "class", "attention", "by torch", "found", *optimizers, "remark")
    body = [_line(family, record, optimizers) for family, record in rows]
    lines = [head, ("---",) * len(head), *body, _sums(rows, optimizers)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    used = ", ".join(f"{name} {version}" for name, version in versions().items())
    return f"`{command}`, {time.strftime('%Y-%m-%d')}\n\n{LEGEND}\n\n{table}\n\nVersions: {used}.\n"


def _line(family: Family, record: Record, optimizers: Sequence[str]) -> tuple[str, ...]:
    left = (family.name, family.model, family.attention)
    if record.detection is None:
        return (*left, "", "", *("" for _ in optimizers), _remark(family, record))
    numbers = (str(record.detection.expected), str(record.detection.found))
    cells = (_cell(record.outcomes.get(name)) for name in optimizers)
    return (*left, *numbers, *cells, _remark(family, record))


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    stopped = " †" if outcome.trouble else ""
    return f"{outcome.freely.lost} → {outcome.kept.lost}, {outcome.extra:+.1f}{stopped}"


def _remark(family: Family, record: Record) -> str:
    if record.why_not:
        return f"does not export: {record.why_not}"
    return family.without.replace("|", "/")


def _sums(rows: Rows, optimizers: Sequence[str]) -> tuple[str, ...]:
    known: list[Mapping[str, Outcome]] = [record.outcomes for _, record in rows]
    detections = [record.detection for _, record in rows if record.detection]
    cells = []
    for name in optimizers:
        outcomes = [one[name] for one in known if name in one]
        freely, kept = sum(one.freely.lost for one in outcomes), sum(one.kept.lost for one in outcomes)
        most = max((one.extra for one in outcomes), default=0.0)
        cells.append(f"{freely} → {kept}, at most {most:+.1f}")
    expected, found = sum(one.expected for one in detections), sum(one.found for one in detections)
    having = sum(one.found > 0 for one in detections)
    return (f"{having} with triples, of {len(detections)} that export", "", "", str(expected), str(found), *cells, "")


LEGEND = (
    "By torch: Q/K/V triples that ran, by torch's module tree. Found: by the finder, each with the very weights of one "
    "such module. For each optimizer, called twice: triples lost without keep → with keep, and the nodes per triple "
    "that keep costs against skipping the merging passes by name. † something of the optimizer failed, or was taken "
    "out, in one of these two."
)
