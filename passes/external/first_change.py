"""Which of several passes is the first to change a model? In the worker, on both halves of the list at once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

__all__ = ["first_change"]

Make = Callable[[str], bytes | None]
"""The name of a pass → the model that it makes, or None when it changes nothing."""

FEW = 4
"""Passes for which another process is not worth its start."""


def first_change(names: Sequence[str], make: Make) -> tuple[int, bytes | None]:
    """How many passes change nothing, and what the next one makes; None if there is no next one.

    Every other pass runs in a fork of this process, which costs milliseconds and no memory. A fork is only sound while
    there are no other threads; with some (onnxruntime's, once it is loaded) the passes run one after the other.
    """
    if len(names) < FEW or _threads() > 1:
        return _first(range(len(names)), names, make) or (len(names), None)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    helper = context.Process(target=_search, args=(theirs, names, make), daemon=True)
    helper.start()
    theirs.close()
    try:
        found = _first(range(0, len(names), 2), names, make)
        other = _told(ours, len(names) if found is None else found[0])
    finally:
        helper.kill()
        helper.join()
        ours.close()
    return min((one for one in (found, other) if one is not None), key=lambda one: one[0], default=(len(names), None))


def _first(places: Sequence[int], names: Sequence[str], make: Make) -> tuple[int, bytes | None] | None:
    for place in places:
        made = make(names[place])
        if made is not None:
            return place, made
    return None


def _search(pipe: Connection, names: Sequence[str], make: Make) -> None:
    """In the fork: tell of each odd place what its pass makes, up to the first change."""
    for place in range(1, len(names), 2):
        made = make(names[place])
        pipe.send((place, made))
        if made is not None:
            break
    pipe.send((len(names), None))


def _told(pipe: Connection, limit: int) -> tuple[int, bytes | None] | None:
    """The fork's first change before place `limit`.

    Raises:
        RuntimeError: the fork died.
    """
    while True:
        try:
            place, made = pipe.recv()
        except EOFError:
            raise RuntimeError("one of the passes ended its process") from None
        if made is not None and place < limit:
            return place, made
        if place + 2 > limit or made is not None:
            return None


def _threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())
