"""From an intercepted call to what it returns, and to its record in the log.

Calls run in workers that outlive them, since importing an optimizer takes seconds: as many as there are calls at once.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from passes.context import PassContext, memory_limit
from passes.guard.call_log import GuardedCall, Returned, call_site, write_call
from passes.guard.calls import Target
from passes.guard.calls.base import InterceptedCall, PassThrough
from passes.guard.enforce import GuardOutcome, RefusedByOptimizer, enforce
from passes.guard.settings import CombinedPolicy, Settings
from passes.worker.client import Worker

__all__ = ["WorkerPool", "handle"]


def handle(
    target: Target,
    original: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    guards: Sequence[Settings],
    workers: WorkerPool,
) -> Any:
    """Make the call under `guards`, and return what the caller expects of it."""
    begun, demands = time.perf_counter(), CombinedPolicy(tuple(guards))
    blank = GuardedCall(
        *(target.key, *call_site()),
        *(os.getpid(), threading.current_thread().name, "", Returned.NOT_JUDGED),
    )

    def write(call: GuardedCall) -> None:
        write_call(replace(call, seconds=round(time.perf_counter() - begun, 3)), guards)

    def let_through(reason: str, instead: Callable[[], Any] | None) -> Any:
        try:
            result = original(*args, **kwargs)
        except Exception:
            write(replace(blank, returned=Returned.RAISED, notes=(reason,)))
            raise
        returned = Returned.NOT_JUDGED if instead is None else Returned.AS_GIVEN
        write(replace(blank, returned=returned, notes=(reason,)))
        return result if instead is None else instead()

    # The optimizer speaks outside of our `except` blocks, so that a traceback of its own shows nothing of ours.
    call = _read(target, original, args, kwargs)
    if isinstance(call, PassThrough):
        return let_through(str(call), call.instead)
    with workers.take(demands.timeout_s, demands.memory_gib) as bench:
        outcome = _enforce_safely(call, demands, bench)
        if isinstance(outcome, RefusedByOptimizer):
            return let_through(str(outcome), lambda: call.deliver(call.model, proven=False))
        result = call.deliver(outcome.model, proven=outcome.proven)
        write(_fill_record(blank, call, outcome, demands))
        return result


def _read(
    target: Target, original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> InterceptedCall | PassThrough:
    try:
        return target.read(original, args, kwargs)
    except PassThrough as reason:
        return reason


def _enforce_safely(
    call: InterceptedCall, demands: CombinedPolicy, bench: PassContext
) -> GuardOutcome | RefusedByOptimizer:
    try:
        return enforce(call, demands, bench)
    except RefusedByOptimizer as refusal:
        return refusal
    except Exception:  # ours: the script must not suffer, and nothing may be lost
        note = f"a bug of onnxline, please report it: {traceback.format_exc()}"
        return GuardOutcome(call.model, Returned.AS_GIVEN, False, notes=(note,))


def _fill_record(
    blank: GuardedCall, call: InterceptedCall, outcome: GuardOutcome, demands: CombinedPolicy
) -> GuardedCall:
    unguarded = outcome.unguarded
    return replace(
        blank,
        model=call.source,
        returned=outcome.returned,
        nodes_before=len(call.model.proto.graph.node),
        nodes_after=len(outcome.model.proto.graph.node),
        proof="numbers" if outcome.proven else "structure",
        kept=outcome.kept,
        missing=tuple(kind for kind in demands.keep() if not outcome.kept.get(kind)),
        reverted=outcome.reverted,
        skipped=outcome.skipped,
        compared=unguarded is not None,
        unguarded_nodes=len(unguarded.model.proto.graph.node) if unguarded and unguarded.model else None,
        unguarded_fault=unguarded.fault if unguarded else "",
        would_have_lost=unguarded.lost if unguarded else (),
        notes=outcome.notes,
    )


Pair = tuple[Worker, Worker]
"""For passes, and for proofs."""


class WorkerPool:
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
