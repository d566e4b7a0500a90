"""Find the first pass of a list that changes a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Sequence

__all__ = ["first_change"]

Make = Callable[[Sequence[str]], bytes | None]
"""The names of passes → the model that they make one after the other, or None when that is the same model."""

Found = Generator[None, None, tuple[int, bytes | None]]


def first_change(names: Sequence[str], make: Make, unlikely: Collection[str] = ()) -> Found:
    """How many passes change nothing, and what the next one makes; None if there is no next one.

    Those that are `unlikely` to change anything are tried together, as far as they come before the first of the others
    that does: what they leave as it is, none of them changes. All others run alone. Yields after each call that has
    changed nothing.
    """
    place, made = yield from _in_turn(names, [at for at, name in enumerate(names) if name not in unlikely], make)
    passed = [at for at, name in enumerate(names[:place]) if name in unlikely]
    if not passed:
        return place, made
    if make([names[at] for at in passed]) is None:
        yield
        return place, made
    earlier, its = yield from _in_turn(names, passed, make)
    return (place, made) if its is None else (earlier, its)


def _in_turn(names: Sequence[str], places: Iterable[int], make: Make) -> Found:
    for place in places:
        made = make([names[place]])
        if made is not None:
            return place, made
        yield
    return len(names), None
