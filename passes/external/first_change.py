"""Find the first pass of a list that changes a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence

__all__ = ["first_change"]

Make = Callable[[Sequence[str]], bytes | None]
"""The names of passes → the model that they make one after the other, or None when that is the same model."""


def first_change(
    names: Sequence[str], make: Make, unlikely: Collection[str] = ()
) -> Generator[None, None, tuple[int, bytes | None]]:
    """How many passes change nothing, and what the next one makes; None if there is no next one.

    Those that are `unlikely` to change anything are tried together: what they leave as it is, none of them changes. All
    others run alone. Yields after each call that has changed nothing.
    """
    together = [place for place, name in enumerate(names) if name in unlikely]
    calls = [[place] for place, name in enumerate(names) if name not in unlikely]
    if together:
        calls.append(together)
    for places in sorted(calls):
        made = make([names[place] for place in places])
        if made is None:
            yield
        elif places is together:
            return (yield from first_change(names, make))
        else:
            return places[0], made
    return len(names), None
