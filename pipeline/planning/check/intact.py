"""Which values have their bytes intact, by byte, so that a write finds those that it destroys."""

from __future__ import annotations

from bisect import bisect_left

from pipeline.planning.check.places import Place

__all__ = ["Intact"]


class Intact:
    """The values that are intact, and where they lie.

    Each region is cut where a value begins or ends; a cut knows the values that cover the bytes from it to the next.
    So a write looks at the cuts inside of its own bytes, and not at every value of the plan.
    """

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}
        self._ages: dict[int, int] = {}
        self._cuts: dict[int, list[int]] = {}
        """By region, in order."""
        self._covering: dict[tuple[int, int], set[int]] = {}
        """By region and cut."""

    def __contains__(self, vid: int) -> bool:
        return vid in self._places

    def add(self, vid: int, place: Place) -> None:
        """Make `vid` intact. If it is empty it covers nothing, and nothing can destroy it."""
        if vid in self._places:
            self._remove(vid)
        self._places[vid] = place
        self._ages[vid] = len(self._ages)
        for cut in self._inside(place):
            self._covering[place.region, cut].add(vid)

    def take(self, place: Place) -> list[int]:
        """The values with a byte in `place`, the oldest first; they are not intact any more."""
        inside = self._inside(place)
        found = set[int]().union(*(self._covering[place.region, cut] for cut in inside))
        for vid in found:
            self._remove(vid)
        for cut in inside[1:]:  # nothing lies on either side of them now
            del self._covering[place.region, cut]
        if inside:
            cuts = self._cuts[place.region]
            first = bisect_left(cuts, inside[0])
            del cuts[first + 1 : first + len(inside)]
        return sorted(found, key=self._ages.__getitem__)

    def _remove(self, vid: int) -> None:
        place = self._places.pop(vid)
        for cut in self._inside(place):
            self._covering[place.region, cut].discard(vid)

    def _inside(self, place: Place) -> list[int]:
        """The cuts from the first byte of `place` to before its end."""
        if place.start >= place.end:
            return []
        cuts = self._cuts.setdefault(place.region, [])
        first, last = self._cut(place.region, cuts, place.start), self._cut(place.region, cuts, place.end)
        return cuts[first:last]

    def _cut(self, region: int, cuts: list[int], at: int) -> int:
        """The index of the cut at byte `at`, which is made if there is none."""
        index = bisect_left(cuts, at)
        if index == len(cuts) or cuts[index] != at:
            covering = self._covering[region, cuts[index - 1]] if index else set[int]()
            cuts.insert(index, at)
            self._covering[region, at] = set(covering)
        return index
