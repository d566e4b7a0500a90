"""Find the inner passes of a composite step that are at fault, by rerunning it without some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

IsGood = Callable[[tuple[str, ...]], bool]
"""Whether the step leaves the model sound when these inner passes are left out."""


def minimal_culprits(names: Sequence[str], suspects: Sequence[str], is_good: IsGood) -> tuple[str, ...] | None:
    """A smallest set of inner passes without which the step is sound; None when even leaving all out does not help.

    Suspects are tried one by one first, which is the common case; then the set is found by divide and conquer
    (QuickXplain: Junker 2004), at about log₂ of the number of passes in runs for each culprit.
    """
    known = [name for name in suspects if name in names]
    for name in known:
        if is_good((name,)):
            return (name,)
    for pool in (known, list(names)):
        if len(pool) > 1 and is_good(tuple(pool)):
            return tuple(_smallest(pool, (), False, is_good))
    return None


def primary_culprit(culprits: Sequence[str], does_the_same: IsGood) -> str:
    """The culprit that made the change: without all the other culprits the result is the same."""
    for name in culprits:
        others = tuple(culprit for culprit in culprits if culprit != name)
        if others and does_the_same(others):
            return name
    return culprits[0]


def _smallest(pool: list[str], background: tuple[str, ...], grown: bool, is_good: IsGood) -> list[str]:
    """A smallest part of `pool` that, left out together with `background`, makes the step sound."""
    if grown and is_good(background):
        return []
    if len(pool) == 1:
        return pool
    half = len(pool) // 2
    left, right = pool[:half], pool[half:]
    from_right = _smallest(right, (*background, *left), True, is_good)
    from_left = _smallest(left, (*background, *from_right), bool(from_right), is_good)
    return from_left + from_right
