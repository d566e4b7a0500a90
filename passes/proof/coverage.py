"""Coverage of a proof, as of a test suite: which behaviour of the model the draws exercised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from passes.proof.draws import Draw, Trait
from passes.proof.gauges import CONDITIONS, Gauges, Limit, Readings
from passes.proof.tables import LookupTable
from passes.suggest import join_first, plural


@dataclass(frozen=True, slots=True)
class TableCoverage:
    """A table whose rows `op` looks up, and how many of them the draws have read (None: not measured).

    `compared` is whether the rows that were not read were compared as weights after every change.
    """

    name: str
    node: str
    op: str
    rows: int
    read: int | None
    compared: bool


@dataclass(frozen=True, slots=True)
class BranchCoverage:
    """Which branches of an If were taken."""

    node: str
    then_taken: bool
    else_taken: bool


@dataclass(frozen=True, slots=True)
class LoopCoverage:
    """How often the body of a Loop was run, for each draw."""

    node: str
    turns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LimitCoverage:
    """Whether a Clip or the like changed values below and above its limits, and kept values between (None: no limit).

    For a Where on a comparison, `below` is whether the condition was false for some element, `above` whether true.
    """

    node: str
    op: str
    below: bool | None
    above: bool | None
    inside: bool


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which behaviour of the reference model the draws of a proof exercised.

    Nodes are named by their first output. `not_covered` says, in sentences, what a wrong pass could change unnoticed.
    """

    draws: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    """The `draws` whose inputs the user gave."""
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Named dim → its sizes; dims without a name are under the empty one."""
    masks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Input of zeros and ones → `mixed`, `ones`, `zeros`."""
    outliers: tuple[str, ...] = ()
    """Inputs that were drawn at ten times their range."""
    tables: tuple[TableCoverage, ...] = ()
    branches: tuple[BranchCoverage, ...] = ()
    loops: tuple[LoopCoverage, ...] = ()
    limits: tuple[LimitCoverage, ...] = ()
    not_covered: tuple[str, ...] = ()


def coverage_of(
    draws: Sequence[Draw],
    labels: Sequence[str],
    inputs: Mapping[str, frozenset[Trait]],
    skipped: Sequence[str],
    gauges: Gauges,
    readings: Readings,
    tables: Sequence[LookupTable],
    uncovered: Sequence[str],
    changes: tuple[Gauges, Readings] = (Gauges(), Readings()),
    ranges: Mapping[str, tuple[float, float]] | None = None,
) -> Coverage:
    """Coverage from the draws, the readings of the gauges, and the final model's tables.

    Args:
        draws: what was drawn.
        labels: the names of all draws, also of those that the caller gave.
        inputs: the traits that each input can be drawn with; empty where the caller gave the inputs.
        skipped: sentences on what was not drawn, and why.
        gauges: what was measured inside of the exported model.
        readings: what the gauges read.
        tables: the tables of the exported model, with the number of rows that were read.
        uncovered: sentences on the rows of tables that could not be compared.
        changes: gauges in the nodes that passes have brought into the final model, and their readings.
        ranges: input → the least and the greatest value in any draw.
    """
    seeded = [draw for draw in draws if not draw.source]
    table_rows = tuple(_table(table, uncovered) for table in tables if table.varies)
    branches, loops, limits = _coverages(gauges, readings)
    return Coverage(
        draws=tuple(labels),
        given=tuple(draw.label for draw in draws if draw.source),
        sizes=_sizes(draws),
        masks={name: _masks(seeded) for name, traits in inputs.items() if seeded and Trait.ONES in traits},
        outliers=tuple(
            name
            for name, traits in inputs.items()
            if Trait.OUTLIERS in traits and any(Trait.OUTLIERS in draw.traits for draw in draws)
        ),
        tables=table_rows,
        branches=branches,
        loops=loops,
        limits=limits,
        not_covered=(
            *skipped,
            *([f"nothing inside of the model was measured: {readings.why_not}"] if readings.why_not else []),
            *uncovered,
            *([] if readings.why_not else _unseen(branches, loops, limits)),
            *_unseen_changes(*changes),
            *_other_sizes(_sizes(seeded)),
            *_other_numbers(ranges or {}, inputs),
            *([NESTED.format(plural(gauges.nested, "node"))] if gauges.nested else []),
        ),
    )


def _coverages(
    gauges: Gauges, readings: Readings
) -> tuple[tuple[BranchCoverage, ...], tuple[LoopCoverage, ...], tuple[LimitCoverage, ...]]:
    branches = tuple(
        BranchCoverage(name, True in readings.taken.get(at, ()), False in readings.taken.get(at, ()))
        for at, (name, _) in enumerate(gauges.branches)
    )
    loops = tuple(LoopCoverage(name, tuple(readings.counts.get(at, ()))) for at, name in enumerate(gauges.loops))
    return branches, loops, tuple(_limit(limit, readings.reached.get(at)) for at, limit in enumerate(gauges.limits))


def _unseen_changes(gauges: Gauges, readings: Readings) -> list[str]:
    """Sentences on what no draw reaches in the nodes that passes have brought in."""
    nested = [NESTED.format(plural(gauges.nested, "node"))] if gauges.nested else []
    if readings.why_not:
        return [f"what passes have brought in was not measured: {readings.why_not}"]
    sentences = (
        *_unseen(*_coverages(gauges, readings)),
        *_describe_unread_rows(gauges, readings),
        *_describe_idle_gates(gauges, readings),
        *nested,
    )
    return [f"{sentence} (a pass has brought it in)" for sentence in sentences]


def _describe_unread_rows(gauges: Gauges, readings: Readings) -> list[str]:
    """Sentences on the rows of lookups that no draw reads."""
    counts = {place: int(np.count_nonzero(~read)) for place, read in readings.rows.items()}
    return [
        f"{lookup.op} {lookup.output!r}: no draw reads {plural(counts[place], 'row')} of {lookup.data!r}"
        for place, lookup in enumerate(gauges.lookups)
        if counts.get(place)
    ]


def _describe_idle_gates(gauges: Gauges, readings: Readings) -> list[str]:
    """Sentences on gates that are one number in all draws; not on what follows from another such gate."""
    fixed = {gate.value for place, gate in enumerate(gauges.gates) if len({*readings.spans.get(place, (0, 1))}) == 1}
    notes: dict[str, list[str]] = {}
    for gate in gauges.gates:
        if gate.value in fixed and fixed.isdisjoint(gate.inputs) and gate.op not in CONDITIONS:
            notes.setdefault(gate.op, []).append(gate.value)
    return [f"{op} {_list_nodes(nodes)}: the same number in every draw" for op, nodes in notes.items()]


def _sizes(draws: Sequence[Draw]) -> dict[str, tuple[int, ...]]:
    sizes: dict[str, set[int]] = {}
    for draw in draws:
        for name, size in draw.sizes.items():
            sizes.setdefault(name, set()).add(size)
    return {name: tuple(sorted(values)) for name, values in sizes.items()}


def _other_sizes(sizes: Mapping[str, Sequence[int]]) -> list[str]:
    """A sentence on the sizes of open dims that no draw has."""
    drawn = [f"{name or 'unnamed dims'} {', '.join(map(str, several))}" for name, several in sizes.items()]
    return [f"sizes of open dims other than those drawn: {'; '.join(drawn)}"] if drawn else []


def _other_numbers(ranges: Mapping[str, tuple[float, float]], inputs: Mapping[str, frozenset[Trait]]) -> list[str]:
    """A sentence on the values that no draw has; masks, and indices, which reach both ends of their table, are left
    out."""
    drawn = [
        f"{name} {low:.4g} to {high:.4g}"
        for name, (low, high) in ranges.items()
        if (traits := inputs.get(name, frozenset())).isdisjoint((Trait.ONES, Trait.ROWS)) or Trait.WIDE in traits
    ]
    return [f"numbers outside of those drawn: {'; '.join(drawn)}"] if drawn else []


def _masks(draws: Sequence[Draw]) -> tuple[str, ...]:
    kinds = [draw.traits & {Trait.ONES, Trait.ZEROS} for draw in draws]
    facts = {"mixed": not all(kinds), "ones": {Trait.ONES} in kinds, "zeros": {Trait.ZEROS} in kinds}
    return tuple(name for name, is_drawn in facts.items() if is_drawn)


def _table(table: LookupTable, uncovered: Sequence[str]) -> TableCoverage:
    lookup = table.lookup
    is_open = any(repr(lookup.data) in sentence for sentence in uncovered)
    return TableCoverage(
        lookup.data, lookup.output, lookup.op, table.rows, table.read, table.is_partial and not is_open
    )


def _limit(limit: Limit, reached: tuple[bool, bool, bool] | None) -> LimitCoverage:
    below, above, inside = reached or (False, False, False)
    return LimitCoverage(
        limit.output, limit.op, below if limit.acts_below else None, above if limit.acts_above else None, inside
    )


def _unseen(
    branches: Sequence[BranchCoverage], loops: Sequence[LoopCoverage], limits: Sequence[LimitCoverage]
) -> list[str]:
    notes: dict[tuple[str, str], list[str]] = {}

    def say(op: str, node: str, what: str) -> None:
        notes.setdefault((op, what), []).append(node)

    for branch in branches:
        for name, is_taken in (("then", branch.then_taken), ("else", branch.else_taken)):
            if not is_taken:
                say("If", branch.node, f"no draw takes its {name} branch")
    for loop in loops:
        turns = {"no turn": 0 in loop.turns, "one turn": 1 in loop.turns, "more": max(loop.turns, default=0) > 1}
        missing = [name for name, is_run in turns.items() if not is_run]
        if missing:
            say("Loop", loop.node, f"no draw runs it for {' or '.join(missing)}")
    for limit in limits:
        for side, is_seen in (("below", limit.below), ("above", limit.above)):
            condition = f"its condition is never {'true' if side == 'above' else 'false'}"
            beyond = f"no value is {side} its {'upper' if side == 'above' else 'lower'} limit"
            if is_seen is False:
                say(limit.op, limit.node, condition if limit.op in CONDITIONS else beyond)
        if not limit.inside and limit.op not in CONDITIONS:
            say(limit.op, limit.node, "every value is beyond its limits")
    return [f"{op} {_list_nodes(nodes)}: {note}" for (op, note), nodes in notes.items()]


def _list_nodes(nodes: Sequence[str]) -> str:
    """The first few of `nodes`, and how many more there are: the layers of a model all give the same sentence."""
    return join_first(list(map(repr, nodes)), MOST_LISTED)


NESTED: Final = "not measured: {} inside of If, Loop, Scan and functions"

MOST_LISTED: Final = 3
