"""Where the rows of one table lie in another: whole, in part, beside others, or changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from passes.proof.numbers import Tolerance, tolerance_for

__all__ = ["Cover", "Match", "match_table"]


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
                found.extend(_aligned(index, same, new, over))
        if same.shape == new.shape and _within_tolerance(same, new, tolerances):
            return Match((Cover(index, 0, 0, len(old)),))
    equal = [one for one in found if not one.differing]
    for one in sorted(found, key=lambda alignment: -alignment.votes):
        if one.differing and not any(_overlap(one, other) for other in equal):
            return Match((), _told(one))
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


def _aligned(index: int, old: np.ndarray, new: np.ndarray, over: int) -> list[_Alignment]:
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


def _told(alignment: _Alignment) -> str:
    lines = alignment.differing
    kind = "row" if alignment.cover.over == 0 else "column"
    first = ", ".join(map(str, lines[:3])) + (f" and {len(lines) - 3} more" if len(lines) > 3 else "")
    return f"{alignment.cover.table} {kind}{'s' if len(lines) > 1 else ''} {first}"


SHORT: Final = 4
"""Numbers in a line."""
