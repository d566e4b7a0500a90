"""Comparison of lookup tables as weights, since no output shows a fault in rows that no draw reads.

Lookups in a new model have to read the rows of the source. A table with the same digest is equal. Any other table is
evaluated and compared with the tables of the source: cast, transposed, split or concatenated, it still has the same
rows. Changed or missing rows are a fault. Tables in any other form are unknown, and the report lists them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper

from passes.graph.index import copy_of, extract
from passes.graph.traversal import reads_of
from passes.model.canonical import ValueDigests
from passes.proof.gauges import Gauges, Readings
from passes.proof.lookups import Lookup, find_lookups
from passes.proof.numbers import Tolerance, tolerance_for
from passes.structures.projection_check import computed_constant
from passes.suggest import join_first
from passes.weights.detached import DetachedModel
from passes.weights.sharing import MappedModel

NEW: Final = "onnxline.new/"
"""Prefix of the names of a changed model, which may name other values in the model before."""


def tensor_of(tensor: TensorProto, name: str) -> TensorProto:
    """A copy of `tensor` called `name`."""
    copy = copy_of(tensor)
    copy.name = name
    return copy


@dataclass(frozen=True, slots=True)
class Cover:
    """The part of an old table that is in a new one: rows (`over` 0) or columns (`over` 1) from `start` to `stop`."""

    table: int
    over: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Match:
    """The parts of old tables that a new table contains. `differing` names rows that differ; empty for none.

    `is_unknown`: the new table contains no part of an old table. A table of integers is never unknown, since integers
    mostly compute shapes.
    """

    covers: tuple[Cover, ...] = ()
    differing: str = ""
    is_unknown: bool = False


@dataclass(frozen=True, slots=True)
class _Alignment:
    """A new table laid over an old one: line `j` of the new is line `j + offset` of the old."""

    cover: Cover
    lines: slice
    """Lines of the new table."""
    differing: tuple[int, ...]
    """Lines of the old table that differ in the new one."""
    votes: int


def match_table(
    olds: Sequence[np.ndarray], new: np.ndarray, tolerances: Mapping[str, Tolerance] | None = None
) -> Match:
    """Compare matrices with a row for each index, bit for bit, after a cast to the dtype of the new table.

    A new table may be an old table, a block of its rows or columns, or a concatenation of such blocks.
    """
    alignments: list[_Alignment] = []
    for index, old in enumerate(olds):
        same = old if old.dtype == new.dtype else _cast(old, new.dtype)
        if same is None:
            continue
        if same.size == new.size and same.tobytes() == new.tobytes():
            return Match((Cover(index, 0, 0, len(old)),))
        for over in (0, 1):
            if same.shape[1 - over] == new.shape[1 - over]:
                alignments.extend(_align(index, same, new, over))
        if same.shape == new.shape and _within_tolerance(same, new, tolerances):
            return Match((Cover(index, 0, 0, len(old)),))
    equal = [alignment for alignment in alignments if not alignment.differing]
    for nearest in sorted(alignments, key=lambda alignment: -alignment.votes):
        if nearest.differing and not any(_overlap(nearest, alignment) for alignment in equal):
            return Match((), _describe_differing(nearest))
    covers = tuple(dict.fromkeys(alignment.cover for alignment in equal))
    return Match(covers, "", not equal and new.dtype.kind not in "biu")


def _cast(old: np.ndarray, dtype: np.dtype) -> np.ndarray | None:
    with np.errstate(all="ignore"):
        try:
            return old.astype(dtype)
        except (TypeError, ValueError):
            return None


def _overlap(first: _Alignment, second: _Alignment) -> bool:
    same_way = first.cover.over == second.cover.over
    return not same_way or max(first.lines.start, second.lines.start) < min(first.lines.stop, second.lines.stop)


def _align(index: int, old: np.ndarray, new: np.ndarray, over: int) -> list[_Alignment]:
    """Align the new table with the old one by the offset at which most lines are equal; empty if none are."""
    old, new = (old, new) if over == 0 else (old.T, new.T)
    before, after = ([hash(line.tobytes()) for line in table] for table in (old, new))
    counts = Counter(before)
    rows = {line: row for row, line in enumerate(before) if counts[line] == 1}
    votes = Counter(rows[line] - row for row, line in enumerate(after) if line in rows)
    if not votes:
        return []
    offset, most = votes.most_common(1)[0]
    start, stop = max(0, -offset), min(len(after), len(before) - offset)
    differing = tuple(at + offset for at in range(start, stop) if after[at] != before[at + offset])
    # Short lines may be equal by chance.
    if differing and (old.shape[1] < SHORT and 2 * most < stop - start):
        return []
    cover = Cover(index, over, start + offset, stop + offset)
    return [_Alignment(cover, slice(start, stop), differing, most)]


def _within_tolerance(old: np.ndarray, new: np.ndarray, tolerances: Mapping[str, Tolerance] | None) -> bool:
    """Whether each row is within the tolerance of its own scale, as it is when a lookup reads it."""
    if new.dtype.kind != "f" or not new.size:
        return False
    tolerance = tolerance_for(str(new.dtype), tolerances)
    left, right = old.astype(np.float64), new.astype(np.float64)
    limits = tolerance.atol + tolerance.rtol * np.abs(left).max(axis=1, keepdims=True)
    return bool((np.abs(left - right) <= limits).all())


def _describe_differing(alignment: _Alignment) -> str:
    lines = alignment.differing
    kind = "row" if alignment.cover.over == 0 else "column"
    return f"{alignment.cover.table} {kind}{'s' if len(lines) > 1 else ''} {join_first(lines, 3)}"


SHORT: Final = 4
"""Lines with fewer elements than this may be equal by chance."""


Key = tuple[str, int]
"""The digest of a table, and the axis of its rows."""


@dataclass(frozen=True, slots=True)
class LookupTable:
    """A table of the source: the draws read `read` of its `rows` rows; `read` is None where it was not measured."""

    lookup: Lookup
    key: Key
    rows: int
    read: int | None
    varies: bool
    """Whether the draws read different rows; if not, an optimizer may have folded the rows as constants."""

    @property
    def is_partial(self) -> bool:
        whole = self.read == self.rows and self.lookup.reads_whole_rows
        return self.varies and not whole


@dataclass(frozen=True, slots=True)
class TablesPart:
    """A model that computes tables from constants alone, and their names in it."""

    model: DetachedModel
    olds: tuple[tuple[str, Lookup], ...]
    news: tuple[tuple[str, Lookup], ...]


def tables_of(gauges: Gauges, readings: Readings, model: DetachedModel, digests: ValueDigests) -> list[LookupTable]:
    """The tables of the source, with the number of rows that the draws have read."""
    tables = []
    dims = {name: tuple(tensor.dims) for name, tensor in model.index.initializers.items()}
    for index, lookup in enumerate(gauges.lookups):
        rows, selectors = readings.rows.get(index), readings.selectors.get(index, [])
        varies = lookup.is_nested or lookup.by_value or len(selectors) < 2 or len(set(selectors)) > 1
        shape = dims.get(lookup.data, ()) if lookup.stored is None else tuple(lookup.stored.dims)
        count = len(rows) if rows is not None else shape[lookup.axis] if lookup.axis < len(shape) else 0
        read = None if rows is None else int(rows.sum())
        tables.append(LookupTable(lookup, _key(lookup, model, digests), count, read, varies))
    return tables


def _key(lookup: Lookup, model: DetachedModel, digests: ValueDigests) -> Key:
    if lookup.stored is not None:
        return model.digest(lookup.stored), lookup.axis
    return digests.values.get(lookup.data, lookup.data), lookup.axis


def match_tables(
    part: MappedModel,
    olds: Sequence[tuple[str, Lookup]],
    news: Sequence[tuple[str, Lookup]],
    tolerances: Mapping[str, Tolerance],
) -> list[Match]:
    """In the worker: match the rows of each new table with the old tables; `part` computes all of them."""
    computed = part.session().run({})
    tables = [lookup.as_rows(computed[name]) for name, lookup in olds]
    return [match_table(tables, lookup.as_rows(computed[name]), tolerances) for name, lookup in news]


Ask = Callable[[TablesPart], Sequence[Match]]
"""A function that evaluates the tables and returns a match for each new table."""


@dataclass(slots=True)
class TableCheck:
    """Compares the tables of later models with those of the source."""

    before: DetachedModel
    tables: Sequence[LookupTable]
    matches: dict[Key, Match] = field(default_factory=dict)
    uncovered: tuple[str, ...] = ()
    """Sentences on the rows of the last model that could not be compared."""

    def fault_of(self, model: DetachedModel, digests: ValueDigests, ask: Ask) -> str:
        """The fault in the tables of `model`; empty where none was found.

        Raises:
            StepFailed: the tables of `model` cannot be evaluated.
        """
        self.uncovered = ()
        partial = [table for table in self.tables if table.is_partial]
        if not partial:
            return ""
        known = {table.key for table in self.tables}
        lookups = {_key(lookup, model, digests): lookup for lookup in find_lookups(model)}
        fresh = {key: lookup for key, lookup in lookups.items() if key not in known}
        unseen = {key: lookup for key, lookup in fresh.items() if key not in self.matches}
        if unseen:
            olds = [table.lookup for table in partial]
            answers = ask(_part_of(self.before, olds, model, list(unseen.values())))
            self.matches |= dict(zip(unseen, answers, strict=True))
        for key, lookup in fresh.items():
            differing = self.matches[key].differing
            if differing:
                index, _, rows = differing.partition(" ")
                return f"the table {partial[int(index)].lookup.data!r}, which {lookup.op} reads, has other {rows}"
        unknown = [
            f"the rows of {lookup.data!r}, which {lookup.op} reads: they are not those of a table of the source"
            for key, lookup in fresh.items()
            if self.matches[key].is_unknown
        ]
        return self._missing(partial, lookups.keys(), [self.matches[key] for key in fresh], unknown)

    def _missing(
        self, partial: Sequence[LookupTable], stored: Collection[Key], matches: Sequence[Match], unknown: Sequence[str]
    ) -> str:
        """The rows that a table has lost, as a message; sets `uncovered`."""
        gone = []
        for index, table in enumerate(partial):
            covers = [cover for match in matches for cover in match.covers if cover.table == index]
            gap = _gap(covers, table.rows)
            if gap:
                return f"the table {table.lookup.data!r} has lost its {gap}"
            if not covers and table.key not in stored and not _has_equal_rows(self.before, table):
                gone.append(f"the rows of {table.lookup.data!r} that no draw reads: no table of the model has them")
        self.uncovered = tuple(dict.fromkeys((*gone, *unknown)))
        return ""


def _has_equal_rows(model: DetachedModel, table: LookupTable) -> bool:
    """Whether all rows of a table are equal, as in a table of segments with one segment."""
    lookup = table.lookup
    if lookup.stored is not None or table.rows > MOST_ROWS:
        return False
    values = computed_constant(model, lookup.data, model.index)
    if values is None or values.size > MOST_ROWS:
        return False
    rows = lookup.as_rows(values)
    return bool((rows == rows[:1]).all())


MOST_ROWS: Final = 2**20
"""Larger tables are not examined here."""


def _gap(covers: Sequence[Cover], rows: int) -> str:
    """The first range of rows that no cover contains; empty where there are no covers of rows."""
    by_rows = sorted((cover.start, cover.stop) for cover in covers if cover.over == 0)
    if not by_rows:
        return ""
    end = 0
    for start, stop in by_rows:
        if start > end:
            return f"rows {end} to {start - 1}"
        end = max(end, stop)
    return f"rows {end} to {rows - 1}" if rows and end < rows else ""


def _part_of(before: DetachedModel, olds: Sequence[Lookup], after: DetachedModel, news: Sequence[Lookup]) -> TablesPart:
    """Build the model that evaluates the tables of two models."""
    proto = extract(after.proto, [])
    names: list[list[tuple[str, Lookup]]] = []
    for side, side_model, lookups in (("old/", before, olds), (NEW, after, news)):
        _copy_constants(side_model, {lookup.data for lookup in lookups if lookup.stored is None}, side, proto.graph)
        names.append([])
        for index, lookup in enumerate(lookups):
            name = f"{side}table {index}"
            data = side + lookup.data
            if lookup.stored is not None:
                data = f"{name} stored"
                proto.graph.initializer.append(tensor_of(lookup.stored, data))
            proto.graph.node.append(helper.make_node("Identity", [data], [name]))
            proto.graph.output.append(onnx.ValueInfoProto(name=name))
            names[-1].append((name, replace(lookup, stored=None)))
    weights = {**before.weights, **after.weights}
    return TablesPart(DetachedModel(proto, weights), tuple(names[0]), tuple(names[1]))


def _copy_constants(model: DetachedModel, wanted: set[str], side: str, into: onnx.GraphProto) -> None:
    """Copy the constants called `wanted`, with the nodes and tensors that they are computed from."""
    index = model.index
    nodes = index.ancestors(wanted)
    for node in nodes:
        copy = into.node.add()
        copy.CopyFrom(node)
        copy.name = ""
        copy.input[:] = [side + name if name else "" for name in node.input]
        copy.output[:] = [side + name if name else "" for name in node.output]
    read = wanted.union(*map(reads_of, nodes))
    into.initializer.extend(
        tensor_of(tensor, side + name) for name, tensor in index.initializers.items() if name in read
    )
