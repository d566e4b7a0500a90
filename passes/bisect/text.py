"""A finding in words: short."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from passes.bisect.found import Culprit, Finding, Smallest

__all__ = ["finding_text"]

MOST: Final = 12
"""Nodes that are written out."""

FAILED: Final = 3
"""Failed steps that are written out."""


def finding_text(finding: Finding, file: str = "") -> str:
    """Some lines; `file` is where the smallest model was written."""
    return "\n".join(_lines(finding, file)) + "\n"


def _lines(finding: Finding, file: str) -> Iterator[str]:
    culprit = finding.culprit
    took = f"{_counted(finding.runs, 'pass run')}, {finding.seconds:.1f} s"
    if culprit is None:
        ran = finding.steps - len(finding.failed)
        of_all = f" of {finding.steps}" if finding.failed else ""
        yield f"{finding.nothing}, after {_counted(ran, 'step')}{of_all} ({took})"
    else:
        yield f"{culprit.name} ({culprit.source}), {_place(culprit, finding.steps)}"
        yield f"  {culprit.why}"
        if len(culprit.lost) > 1:
            yield f"  and {len(culprit.lost) - 1} more: {_listed(culprit.lost[1:])}"
        if culprit.others:
            yield f"  without it the same is done by {', '.join(culprit.others)}"
        if finding.smallest is not None:
            yield from _fault(finding.smallest)
        yield f"found in {took}"
    yield from (f"note: {note}" for note in finding.notes)
    yield from (f"left out, since it fails: {failed}" for failed in finding.failed[:FAILED])
    if len(finding.failed) > FAILED:
        yield f"and {len(finding.failed) - FAILED} more that fail; --crash looks for the first of them"
    if culprit is not None:
        yield from _file(finding.smallest, file)
        names = [culprit.name, *(f"{culprit.step}/{name}" for name in culprit.others)]
        yield f"what comes next without it: add {' '.join(f'--skip {name}' for name in names)}"


def _place(culprit: Culprit, steps: int) -> str:
    turn = f", turn {culprit.turn} of a repeat" if culprit.repeats else ""
    return f"step {culprit.place} of {steps}{turn}"


def _fault(smallest: Smallest) -> Iterator[str]:
    yield "nodes at fault"
    for sign, entries in (("-", smallest.removed), ("+", smallest.added), ("~", smallest.changed)):
        yield from (f"  {sign} {entry}" for entry in entries[:MOST])
        if len(entries) > MOST:
            yield f"  {sign} and {len(entries) - MOST} more"
    if smallest.elsewhere:
        yield f"  and at {_counted(smallest.elsewhere, 'other place')} of it"


def _file(smallest: Smallest | None, file: str) -> Iterator[str]:
    if smallest is None:
        yield "no smaller model: the step does not show it by itself on what it was given, or there was no time"
    elif file:
        took = f"{_counted(smallest.runs, 'more run')}, {smallest.seconds:.1f} s"
        yield f"smallest model: {file}, {_counted(smallest.nodes, 'node')} ({took})"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")
