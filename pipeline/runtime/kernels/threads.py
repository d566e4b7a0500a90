"""For how many threads of torch kernels are chosen: those that torch had when the program was compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

import torch

PLANNED_THREADS: Final[ContextVar[int]] = ContextVar("PLANNED_THREADS", default=0)
"""Threads of torch when the program was compiled whose launches are bound now; 0 where none is."""


@contextmanager
def kernels_for_threads(threads: int) -> Iterator[None]:
    """Choose kernels as for so many threads of torch. A context that is made later than its program chooses those that
    it had then, whatever the number is now: other kernels sum in another order."""
    token = PLANNED_THREADS.set(threads)
    try:
        yield
    finally:
        PLANNED_THREADS.reset(token)


def planned_threads() -> int:
    """The number that kernels are chosen for. Every kernel that looks at threads asks here, and not torch."""
    return PLANNED_THREADS.get() or torch.get_num_threads()
