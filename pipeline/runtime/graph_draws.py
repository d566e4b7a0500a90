"""How the graphs of a device draw for torch's default generator.

torch keeps the seed and the offset of a generator once on the device, for all graphs that know it, and each replay
writes them there. So graphs that knew the default generator could not be replayed on two streams at once, nor while
another thread records. Each graph knows a generator of its own instead, which follows the default one.

Untested on a GPU; the rules are proven on `recording.RecordingDevice`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

RECORDING: Final = threading.RLock()
"""Held by a thread that records, waits for a device, or replays a graph that draws for torch's default generator. CUDA
refuses to wait for a device where another thread records; and while one records, its generator is the default one."""


class DrawingGraph:
    """A graph that draws from `own`, and advances `default` by what it draws."""

    def __init__(self, replay: Callable[[], None], own: torch.Generator, default: torch.Generator) -> None:
        self._replay, self._own, self._default = replay, own, default

    def replay(self) -> None:
        with RECORDING:
            follow(self._own, self._default)
            self._replay()
            follow(self._default, self._own)


def follow(generator: torch.Generator, other: torch.Generator) -> None:
    """Let `generator` draw what `other` would draw next: a generator of CUDA is a seed and an offset, and to copy its
    state instead would be most of our own time of a replay."""
    seed = other.initial_seed()
    if generator.initial_seed() != seed:
        generator.manual_seed(seed)
    generator.set_offset(other.get_offset())


@contextmanager
def standing_in(own: torch.Generator, default: torch.Generator) -> Iterator[None]:
    """Inside, torch draws from `own` for `default`, its default generator of a device, and a graph whose capture begins
    knows `own` in its place."""
    before = default.graphsafe_get_state()
    own.set_state(default.get_state())
    default.graphsafe_set_state(own)
    try:
        yield
    finally:
        default.graphsafe_set_state(before)
        default.set_state(own.get_state())  # another thread may have given a seed
