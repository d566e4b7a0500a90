"""Workers that outlive a call, since importing an optimizer takes seconds: as many as there are calls at once."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from passes.context import PassContext, memory_limit
from passes.worker.client import Worker

__all__ = ["Benches"]


Pair = tuple[Worker, Worker]
"""For passes, and for proofs."""


class Benches:
    """Hands out workbenches. After a fork the child starts its own workers, and leaves its parent's alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Pair] = []
        self._not_ours: list[Pair] = []
        self._open = True
        if hasattr(os, "register_at_fork"):  # Windows has no fork
            os.register_at_fork(after_in_child=self._forget)

    @contextlib.contextmanager
    def take(self, timeout_s: float, memory_gib: float | None = None) -> Iterator[PassContext]:
        pair = self._pair(memory_limit(memory_gib))
        for worker in pair:
            worker.timeout_s = timeout_s
        try:
            with tempfile.TemporaryDirectory(prefix="onnxline-") as folder:
                yield PassContext(pair[0], Path(folder), pair[1])
        finally:
            with self._lock:
                kept = self._open
                if kept:
                    self._idle.append(pair)
            if not kept:
                _close(pair)

    def _pair(self, limit: int) -> Pair:
        """One of those that are idle, if it has the limit: a process cannot be given another one later."""
        with self._lock:
            found = next((pair for pair in self._idle if pair[0].memory_bytes == limit), None)
            if found is None:
                return Worker(memory_bytes=limit), Worker(memory_bytes=limit)
            self._idle.remove(found)
            return found

    def open(self) -> None:
        """Workers are kept for the next call."""
        self._open = True

    def close(self) -> None:
        """End the workers that are idle; those that work end with their call."""
        with self._lock:
            self._open = False
            idle, self._idle = self._idle, []
        for pair in idle:
            _close(pair)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._not_ours += self._idle  # still referred to: to drop them would speak to the parent's processes
        self._idle = []


def _close(pair: Pair) -> None:
    for worker in pair:
        worker.close()
