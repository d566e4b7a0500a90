"""Tables of which the draws do not read all rows: compared as weights, since no output tells of the rows unread.

Whatever reads rows in a new model has to read those of the source. A table that means what it did is the same. Any
other is evaluated and held against the tables of the source: cast, transposed, split or put behind
another one it still has the same rows. Rows that were changed, or cut off, are a fault. What has no such form is not
known, and the report says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import onnx
from onnx import helper

from passes.graph.traversal import reads_of
from passes.model.canonical import ValueDigests
from passes.proof.gauges import Gauges, Readings
from passes.proof.lookups import Lookup, find_lookups, values_of_inputs
from passes.proof.numbers import Tolerance, tolerance_for
from passes.proof.part import NEW, tensor_of
from passes.structures.projection_check import computed_constant
from passes.weights.detached import DetachedModel

__all__ = ["Cover", "LookupTable", "Match", "TableCheck", "TablesPart", "match_table", "tables_of"]


@dataclass(frozen=True, slots=True)
class Cover:
    """The part of an old table that lies in a new one: rows (`over` 0) or columns (`over` 1) from `start` to `stop`."""

    table: int
    over: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Match:
    """What a new table holds of the old ones. `changed` tells of rows that are others now; empty for none.

    `is_unknown` where it holds nothing of them, and is no table of whole numbers, which mostly compute shapes.
    """

    covers: tuple[Cover, ...] = ()
    changed: str = ""
    is_unknown: bool = False


@dataclass(frozen=True, slots=True)
class _Alignment:
    """A new table laid over an old one: line `j` of the new is line `j + offset` of the old."""

    cover: Cover
    lines: slice
    """Of the new table."""
    differing: tuple[int, ...]
    """Lines of the old table that are others in the new one."""
    votes: int


def match_table(
    olds: Sequence[np.ndarray], new: np.ndarray, tolerances: Mapping[str, Tolerance] | None = None
) -> Match:
    """Compare matrices with a row for each index, bit for bit, after a cast to the dtype of the new one.

    A new table may be an old one, a block of its rows or columns, or several of them one behind the other.
    """
    found: list[_Alignment] = []
    for index, old in enumerate(olds):
        same = old if old.dtype == new.dtype else _cast(old, new.dtype)
        if same is None:
            continue
        if same.size == new.size and same.tobytes() == new.tobytes():
            return Match((Cover(index, 0, 0, len(old)),))
        for over in (0, 1):
            if same.shape[1 - over] == new.shape[1 - over]:
                found.extend(_align(index, same, new, over))
        if same.shape == new.shape and _within_tolerance(same, new, tolerances):
            return Match((Cover(index, 0, 0, len(old)),))
    equal = [one for one in found if not one.differing]
    for one in sorted(found, key=lambda alignment: -alignment.votes):
        if one.differing and not any(_overlap(one, other) for other in equal):
            return Match((), _describe_differing(one))
    return Match(tuple(dict.fromkeys(one.cover for one in equal)), "", not equal and new.dtype.kind not in "biu")


def _cast(old: np.ndarray, dtype: np.dtype) -> np.ndarray | None:
    with np.errstate(all="ignore"):
        try:
            return old.astype(dtype)
        except (TypeError, ValueError):
            return None


def _overlap(one: _Alignment, other: _Alignment) -> bool:
    same_way = one.cover.over == other.cover.over
    return not same_way or max(one.lines.start, other.lines.start) < min(one.lines.stop, other.lines.stop)


def _align(index: int, old: np.ndarray, new: np.ndarray, over: int) -> list[_Alignment]:
    """The new table over the old one as most of their lines fit; none where no line does."""
    old, new = (old, new) if over == 0 else (old.T, new.T)
    before, after = ([hash(line.tobytes()) for line in table] for table in (old, new))
    counts = Counter(before)
    places = {line: place for place, line in enumerate(before) if counts[line] == 1}
    votes = Counter(places[line] - place for place, line in enumerate(after) if line in places)
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
    """Row by row, each by its own scale: a row that is read is judged so too."""
    if new.dtype.kind != "f" or not new.size:
        return False
    tolerance = tolerance_for(str(new.dtype), tolerances)
    left, right = old.astype(np.float64), new.astype(np.float64)
    limits = tolerance.atol + tolerance.rtol * np.abs(left).max(axis=1, keepdims=True)
    return bool((np.abs(left - right) <= limits).all())


def _describe_differing(alignment: _Alignment) -> str:
    lines = alignment.differing
    kind = "row" if alignment.cover.over == 0 else "column"
    first = ", ".join(map(str, lines[:3])) + (f" and {len(lines) - 3} more" if len(lines) > 3 else "")
    return f"{alignment.cover.table} {kind}{'s' if len(lines) > 1 else ''} {first}"


SHORT: Final = 4
"""Numbers in a line."""


Key = tuple[str, int]
"""What a table means, and along which axis its rows lie."""


@dataclass(frozen=True, slots=True)
class LookupTable:
    """A table of the source, of which `read` of `rows` rows were read; `read` is None where that was not measured."""

    lookup: Lookup
    key: Key
    rows: int
    read: int | None
    varies: bool
    """Whether the draws differ in which rows they read: else an optimizer may have taken these rows for constants."""

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


def tables_of(gauges: Gauges, readings: Readings, model: DetachedModel, meanings: ValueDigests) -> list[LookupTable]:
    """The tables of the source, as the draws have read them."""
    found = []
    dims = {tensor.name: tuple(tensor.dims) for tensor in model.proto.graph.initializer}
    by_value = values_of_inputs(model) if gauges.lookups else set()
    for place, lookup in enumerate(gauges.lookups):
        rows, says = readings.rows.get(place), readings.says.get(place, [])
        varies = lookup.is_nested or not by_value.isdisjoint(lookup.says) or len(says) < 2 or len(set(says)) > 1
        shape = dims.get(lookup.data, ()) if lookup.stored is None else tuple(lookup.stored.dims)
        count = len(rows) if rows is not None else shape[lookup.axis] if lookup.axis < len(shape) else 0
        read = None if rows is None else int(rows.sum())
        found.append(LookupTable(lookup, _key(lookup, model, meanings), count, read, varies))
    return found


def _key(lookup: Lookup, model: DetachedModel, meanings: ValueDigests) -> Key:
    if lookup.stored is not None:
        return model.digest(lookup.stored), lookup.axis
    return meanings.values.get(lookup.data, lookup.data), lookup.axis


Ask = Callable[[TablesPart], Sequence[Match]]
"""Evaluates the tables, and gives a match for each new one."""


@dataclass(slots=True)
class TableCheck:
    """Holds the tables of later models against those of the source."""

    source: DetachedModel
    tables: Sequence[LookupTable]
    matches: dict[Key, Match] = field(default_factory=dict)
    uncovered: tuple[str, ...] = ()
    """Of the model that was looked at last: what is not known of its tables."""

    def fault_of(self, model: DetachedModel, meanings: ValueDigests, ask: Ask) -> str:
        """What is wrong with the tables of `model`; empty where nothing is known to be.

        Raises:
            StepFailed: its tables cannot be evaluated.
        """
        self.uncovered = ()
        partial = [table for table in self.tables if table.is_partial]
        if not partial:
            return ""
        known = {table.key for table in self.tables}
        lookups = {_key(one, model, meanings): one for one in find_lookups(model)}
        fresh = {key: one for key, one in lookups.items() if key not in known}
        unseen = {key: one for key, one in fresh.items() if key not in self.matches}
        if unseen:
            olds = [table.lookup for table in partial]
            found = ask(_part_of(self.source, olds, model, list(unseen.values())))
            self.matches |= dict(zip(unseen, found, strict=True))
        for key, lookup in fresh.items():
            changed = self.matches[key].changed
            if changed:
                index, _, rows = changed.partition(" ")
                return f"the table {partial[int(index)].lookup.data!r}, which {lookup.op} reads, has other {rows}"
        unknown = [
            f"the rows of {lookup.data!r}, which {lookup.op} reads: they are not those of a table of the source"
            for key, lookup in fresh.items()
            if self.matches[key].is_unknown
        ]
        return self._missing(partial, lookups.keys(), [self.matches[key] for key in fresh], unknown)

    def _missing(
        self, partial: Sequence[LookupTable], there: Collection[Key], matches: Sequence[Match], unknown: Sequence[str]
    ) -> str:
        """What was cut off of a table; takes note of what is not known."""
        gone = []
        for index, table in enumerate(partial):
            covers = [cover for match in matches for cover in match.covers if cover.table == index]
            gap = _gap(covers, table.rows)
            if gap:
                return f"the table {table.lookup.data!r} has lost its {gap}"
            if not covers and table.key not in there and not _has_equal_rows(self.source, table):
                gone.append(f"the rows of {table.lookup.data!r} that no draw reads: no table of the model has them")
        self.uncovered = tuple(dict.fromkeys((*gone, *unknown)))
        return ""


def _has_equal_rows(model: DetachedModel, table: LookupTable) -> bool:
    """Whether it makes no difference which row of a table is read, as of the segments of a text that has one."""
    lookup, stored = table.lookup, {tensor.name: tensor for tensor in model.proto.graph.initializer}
    if lookup.stored is not None or table.rows > MOST_ROWS:
        return False
    makers = {name: node for node in model.proto.graph.node for name in node.output}
    values = computed_constant(model, lookup.data, makers, stored)
    if values is None or values.size > MOST_ROWS:
        return False
    rows = lookup.as_rows(values)
    return bool((rows == rows[:1]).all())


MOST_ROWS: Final = 2**20
"""Numbers of a table that is looked at here."""


def _gap(covers: Sequence[Cover], rows: int) -> str:
    """The first rows that are in none of the pieces; empty where there are no pieces."""
    by_rows = sorted((one.start, one.stop) for one in covers if one.over == 0)
    if not by_rows:
        return ""
    end = 0
    for start, stop in by_rows:
        if start > end:
            return f"rows {end} to {start - 1}"
        end = max(end, stop)
    return f"rows {end} to {rows - 1}" if rows and end < rows else ""


def _part_of(source: DetachedModel, olds: Sequence[Lookup], model: DetachedModel, news: Sequence[Lookup]) -> TablesPart:
    """What it takes to evaluate the tables of two models."""
    proto = onnx.ModelProto(ir_version=model.proto.ir_version, opset_import=model.proto.opset_import)
    proto.graph.name = "tables"
    names: list[list[tuple[str, Lookup]]] = []
    for side, given, lookups in (("old/", source, olds), (NEW, model, news)):
        _copy_constants(given, {one.data for one in lookups if one.stored is None}, side, proto.graph)
        names.append([])
        for place, lookup in enumerate(lookups):
            name = f"{side}table {place}"
            data = side + lookup.data
            if lookup.stored is not None:
                data = f"{name} stored"
                proto.graph.initializer.append(tensor_of(lookup.stored, data))
            proto.graph.node.append(helper.make_node("Identity", [data], [name]))
            proto.graph.output.append(onnx.ValueInfoProto(name=name))
            names[-1].append((name, replace(lookup, stored=None)))
    weights = {**source.weights, **model.weights}
    return TablesPart(DetachedModel(proto, weights), tuple(names[0]), tuple(names[1]))


def _copy_constants(model: DetachedModel, wanted: set[str], side: str, into: onnx.GraphProto) -> None:
    """Copy the constants called `wanted`, and what they are computed from."""
    wanted, nodes = set(wanted), []
    for node in reversed(model.proto.graph.node):
        if wanted.isdisjoint(node.output):
            continue
        wanted.update(reads_of(node))
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = ""
        copy.input[:] = [side + name if name else "" for name in node.input]
        copy.output[:] = [side + name if name else "" for name in node.output]
        nodes.append(copy)
    into.node.extend(reversed(nodes))
    for tensor in model.proto.graph.initializer:
        if tensor.name in wanted:
            into.initializer.append(tensor_of(tensor, side + tensor.name))
