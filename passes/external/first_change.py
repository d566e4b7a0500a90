"""Find the first pass of a list that changes a model. In the worker, two passes at a time."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

__all__ = ["first_change"]

Make = Callable[[Sequence[str]], bytes | None]
"""The names of passes → the model that they make one after the other, or None when that is the same model."""

Job = Sequence[int]
"""Places in the list that are tried in one call."""


def first_change(names: Sequence[str], make: Make, unlikely: Collection[str] = ()) -> tuple[int, bytes | None]:
    """How many passes change nothing, and what the next one makes; None if there is no next one.

    Those that are `unlikely` to change anything are tried together: what they leave as it is, none of them changes. All
    others run alone. Every other call is made by a fork of this process, which costs milliseconds and no memory. A fork
    is only sound while there are no other threads; with some (onnxruntime's, once it is loaded) there is none.
    """
    together = [place for place, name in enumerate(names) if name in unlikely]
    alone = [[place] for place, name in enumerate(names) if name not in unlikely]
    jobs: list[Job] = sorted([*([together] if together else []), *alone], key=lambda job: job[0])
    place, made = _first(jobs, lambda job: make([names[one] for one in job]))
    if made is not None and place in together:
        return first_change(names, make)
    return (len(names), None) if made is None else (place, made)


def _first(jobs: Sequence[Job], run: Callable[[Job], bytes | None]) -> tuple[int, bytes | None]:
    """The first place of the first job that makes something; jobs come in the order of their first places."""
    if len(jobs) < 2 or _threads() > 1:
        found = ((job[0], made) for job in jobs if (made := run(job)) is not None)
        return next(found, (-1, None))
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    taken = context.Value("i", 0)

    def take() -> int:
        with taken.get_lock():
            taken.value += 1
            return taken.value - 1

    helper = context.Process(target=_help, args=(theirs, jobs, run, take), daemon=True)
    helper.start()
    theirs.close()
    try:
        done: dict[int, bytes | None] = {}
        while not any(done.values()) and (index := take()) < len(jobs):
            done[index] = run(jobs[index])
            done.update(_told(ours))
        # What the fork has begun before the first change counts too.
        while not all(index in done for index in range(_end(jobs, done))):
            ours.poll(None)
            told = _told(ours)
            if not told:
                raise RuntimeError("one of the passes ended its process")
            done.update(told)
    finally:
        helper.kill()
        helper.join()
        ours.close()
    return next(((jobs[one][0], made) for one, made in sorted(done.items()) if made), (-1, None))


def _end(jobs: Sequence[Job], done: Mapping[int, bytes | None]) -> int:
    """How many jobs have to be done to know the first change."""
    return min((index for index, made in done.items() if made), default=len(jobs))


def _help(pipe: Connection, jobs: Sequence[Job], run: Callable[[Job], bytes | None], take: Callable[[], int]) -> None:
    """In the fork: take jobs, and tell what they make, up to the first change."""
    while (index := take()) < len(jobs):
        made = run(jobs[index])
        pipe.send((index, made))
        if made:
            break


def _told(pipe: Connection) -> dict[int, bytes | None]:
    """What the fork has told since; nothing if it has nothing to tell, or has ended."""
    told: dict[int, bytes | None] = {}
    with contextlib.suppress(EOFError):
        while pipe.poll():
            told.update([pipe.recv()])
    return told


def _threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())
