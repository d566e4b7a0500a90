"""The result of a bisection: as data, as text, and for JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from passes.diff.types import NodeLabel
from passes.suggest import ELLIPSIS, join_first, plural, shorten_lines
from passes.visible import Table, TableResult, visible_line
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class Culprit:
    """The pass at fault.

    `inner` is the pass inside of a composite step; `others` are passes that are at fault once `inner` is left out.
    `place` counts the recipe's steps from 1, `turn` the rounds of a repeat. `lost` are the structures that this step
    loses. `source` is the library of the step, `why` how the step shows the fault, and `repeats` whether the step is in
    a repeat. `error_before` and `error_after` are the largest absolute errors of the whole model before and after the
    step, if the fault is measured.
    """

    step: str
    """The step's name, as the recipe names it."""
    source: str
    inner: str
    others: tuple[str, ...]
    place: int
    turn: int
    repeats: bool
    why: str
    lost: tuple[str, ...] = ()
    error_before: float | None = None
    error_after: float | None = None

    @property
    def name(self) -> str:
        """The name as a skip list writes it."""
        return f"{self.step}/{self.inner}" if self.inner else self.step


@dataclass(frozen=True, slots=True)
class Smallest:
    """The smallest model, with the nodes that the step removes from it and adds to it. For a step that breaks down
    `removed` are all nodes of the model. `seconds` and `runs` are the cost of the search for it."""

    model: DetachedModel
    """The model, on which the step still shows the fault."""
    removed: tuple[NodeLabel, ...] = ()
    added: tuple[NodeLabel, ...] = ()
    """The nodes that the step adds."""
    changed: tuple[str, ...] = ()
    """Differences of the nodes that stay: attributes, inputs, stored tensors."""
    elsewhere: int = 0
    """Other places at which the step adds or removes nodes."""
    runs: int = 0
    seconds: float = 0.0

    @property
    def nodes(self) -> int:
        return len(self.model.proto.graph.node)


@dataclass(frozen=True, slots=True)
class Bisection(TableResult):
    """What was looked for, and what was found; without a culprit `nothing` says so.

    `runs` counts the calls of libraries that it took to name the culprit; `failed` are steps that were left out since
    they fail; `notes` are caveats.
    """

    fault: str
    """The fault in words."""
    steps: int
    """The number of steps in the recipe."""
    culprit: Culprit | None
    """The pass at fault; None if no step shows the fault."""
    smallest: Smallest | None
    """The smallest model that shows the fault; None if none was looked for or found."""
    nothing: str
    runs: int
    seconds: float
    """Wall time until the culprit was named, without the search for the smallest model."""
    failed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return shorten_lines(("Bisection", *bisection_text(self).splitlines()))

    def tables(self) -> Iterator[Table]:
        culprit, took = self.culprit, f"{plural(self.runs, 'pass run')}, {self.seconds:.1f} s"
        rows = [("looked for", self.fault), ("found", self.nothing or "nothing")]
        if culprit is not None:
            place = _place_text(culprit, self.steps)
            rows = [rows[0], ("pass", f"{culprit.name} ({culprit.source})"), ("place", place), ("why", culprit.why)]
            rows += [("lost", name) for name in culprit.lost] + [("without it, by", name) for name in culprit.others]
        notes = [("note", note) for note in self.notes] + [("left out, since it fails", step) for step in self.failed]
        yield Table("bisection", [*rows, ("took", took), *notes])
        if self.smallest is not None:
            yield Table("nodes at fault", [line.split(maxsplit=1) for line in list(_fault(self.smallest))[1:]])


MOST: Final = 12
"""Nodes that are written out."""

MOST_FAILED: Final = 3
"""Failed steps that are written out."""


def bisection_text(finding: Bisection, file: str = "") -> str:
    """The result of a bisection as text.

    Args:
        finding: the result.
        file: where the smallest model was written; empty if it was not.

    Returns:
        Lines for a terminal, without control characters.
    """
    return "\n".join(map(visible_line, _lines(finding, file))) + "\n"


def _lines(finding: Bisection, file: str) -> Iterator[str]:
    culprit = finding.culprit
    took = f"{plural(finding.runs, 'pass run')}, {finding.seconds:.1f} s"
    if culprit is None:
        ran = finding.steps - len(finding.failed)
        of_all = f" of {finding.steps}" if finding.failed else ""
        yield f"{finding.nothing}, after {plural(ran, 'step')}{of_all} ({took})"
    else:
        yield f"{culprit.name} ({culprit.source}), {_place_text(culprit, finding.steps)}"
        yield f"  {culprit.why}"
        if len(culprit.lost) > 1:
            yield f"  and {len(culprit.lost) - 1} more: {join_first(culprit.lost[1:], 3, ELLIPSIS)}"
        if culprit.others:
            yield f"  without it the same is done by {', '.join(culprit.others)}"
        if finding.smallest is not None:
            yield from _fault(finding.smallest)
        yield f"found in {took}"
    yield from (f"note: {note}" for note in finding.notes)
    yield from (f"left out, since it fails: {failed}" for failed in finding.failed[:MOST_FAILED])
    if len(finding.failed) > MOST_FAILED:
        yield f"and {len(finding.failed) - MOST_FAILED} more that fail; --crash looks for the first of them"
    if culprit is not None:
        yield from _file(finding.smallest, file)
        names = [culprit.name, *(f"{culprit.step}/{name}" for name in culprit.others)]
        yield f"what comes next without it: add {' '.join(f'--skip {name}' for name in names)}"


def _place_text(culprit: Culprit, steps: int) -> str:
    turn = f", turn {culprit.turn} of a repeat" if culprit.repeats else ""
    return f"step {culprit.place} of {steps}{turn}"


def _fault(smallest: Smallest) -> Iterator[str]:
    yield "nodes at fault"
    for sign, entries in (("-", smallest.removed), ("+", smallest.added), ("~", smallest.changed)):
        yield from (f"  {sign} {entry}" for entry in entries[:MOST])
        if len(entries) > MOST:
            yield f"  {sign} and {len(entries) - MOST} more"
    if smallest.elsewhere:
        yield f"  and at {plural(smallest.elsewhere, 'other place')} of it"


def _file(smallest: Smallest | None, file: str) -> Iterator[str]:
    if smallest is None:
        yield "no smaller model: the step does not show it by itself on what it was given, or there was no time"
    elif file:
        took = f"{plural(smallest.runs, 'more run')}, {smallest.seconds:.1f} s"
        yield f"smallest model: {file}, {plural(smallest.nodes, 'node')} ({took})"


def bisection_as_data(finding: Bisection, file: str = "") -> dict[str, Any]:
    """The result of a bisection as data for JSON.

    Args:
        finding: the result.
        file: where the smallest model was written; empty if it was not.

    Returns:
        The fields of `Bisection`; for the smallest model its `file` and the number of its `nodes`. JSON has no
        infinity:
        such a number is written as "Infinity".
    """
    culprit = None
    if finding.culprit is not None:
        culprit = {"name": finding.culprit.name, **dataclasses.asdict(finding.culprit)}
        for key in ("error_before", "error_after"):
            culprit[key] = _number(culprit[key])
    return {
        "fault": finding.fault,
        "found": culprit is not None,
        "culprit": culprit,
        "smallest": None if finding.smallest is None else _smallest_as_data(finding.smallest, file),
        **{key: getattr(finding, key) for key in ("steps", "nothing", "runs", "seconds", "failed", "notes")},
    }


def _smallest_as_data(smallest: Smallest, file: str) -> dict[str, Any]:
    removed, added = ([dataclasses.asdict(node) for node in nodes] for nodes in (smallest.removed, smallest.added))
    return {
        "file": file,
        "nodes": smallest.nodes,
        "removed": removed,
        "added": added,
        **{key: getattr(smallest, key) for key in ("changed", "elsewhere", "runs", "seconds")},
    }


def _number(value: float | None) -> float | str | None:
    return "Infinity" if value is not None and math.isinf(value) else value
