"""Handle an intercepted call: run it under the policy, write its record, and return its result.

Calls run in workers that are reused, since importing an optimizer takes seconds; concurrent calls have workers each.
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

from passes.context import PassContext, worker_memory
from passes.guard.call_log import GuardedCall, Returned, call_site, write_call
from passes.guard.calls import Target
from passes.guard.calls.base import InterceptedCall, PassThrough
from passes.guard.enforce import GuardOutcome, RefusedByOptimizer, enforce
from passes.guard.settings import CombinedPolicy, Settings
from passes.worker.client import Worker


def handle(
    target: Target,
    original: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    guards: Sequence[Settings],
    workers: WorkerPool,
) -> Any:
    """Make the call under `guards`, and return its result to the caller."""
    begun, policy = time.perf_counter(), CombinedPolicy(tuple(guards))
    blank = GuardedCall(
        *(target.key, *call_site()),
        *(os.getpid(), threading.current_thread().name, "", Returned.NOT_JUDGED),
    )

    def write(call: GuardedCall) -> None:
        write_call(replace(call, seconds=round(time.perf_counter() - begun, 3)), guards)

    def pass_through(reason: str, instead: Callable[[], Any] | None) -> Any:
        try:
            result = original(*args, **kwargs)
        except Exception:
            write(replace(blank, returned=Returned.RAISED, notes=(reason,)))
            raise
        returned = Returned.NOT_JUDGED if instead is None else Returned.AS_GIVEN
        write(replace(blank, returned=returned, notes=(reason,)))
        return result if instead is None else instead()

    # The optimizer is called outside of our `except` blocks, so that its tracebacks show no frames of ours.
    call = _read(target, original, args, kwargs)
    if isinstance(call, PassThrough):
        return pass_through(str(call), call.instead)
    with workers.take(policy.timeout_s, policy.memory_gib) as context:
        outcome = _enforce_safely(call, policy, context)
        if isinstance(outcome, RefusedByOptimizer):
            return pass_through(str(outcome), lambda: call.deliver(call.model, proven=False))
        result = call.deliver(outcome.model, proven=outcome.proven)
        write(_fill_record(blank, call, outcome, policy))
        return result


def _read(
    target: Target, original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> InterceptedCall | PassThrough:
    try:
        return target.read(original, args, kwargs)
    except PassThrough as reason:
        return reason


def _enforce_safely(
    call: InterceptedCall, policy: CombinedPolicy, context: PassContext
) -> GuardOutcome | RefusedByOptimizer:
    try:
        return enforce(call, policy, context)
    except RefusedByOptimizer as refusal:
        return refusal
    except Exception:  # a bug of ours: the script goes on, with the model that came in
        note = f"a bug of onnxline, please report it: {traceback.format_exc()}"
        return GuardOutcome(call.model, Returned.AS_GIVEN, False, notes=(note,))


def _fill_record(
    blank: GuardedCall, call: InterceptedCall, outcome: GuardOutcome, policy: CombinedPolicy
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
        missing=tuple(kind for kind in policy.keep() if not outcome.kept.get(kind)),
        reverted=outcome.reverted,
        skipped=outcome.skipped,
        compared=unguarded is not None,
        unguarded_nodes=len(unguarded.model.proto.graph.node) if unguarded and unguarded.model else None,
        unguarded_fault=unguarded.fault if unguarded else "",
        would_have_lost=unguarded.lost if unguarded else (),
        notes=outcome.notes,
    )


Pair = tuple[Worker, Worker]
"""One worker for passes, and one for proofs."""


class WorkerPool:
    """Lends workers to calls. After a fork the child starts its own workers, and leaves its parent's alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Pair] = []
        self._not_ours: list[Pair] = []
        self._open = True
        if hasattr(os, "register_at_fork"):  # Windows has no fork
            os.register_at_fork(after_in_child=self._forget)

    @contextlib.contextmanager
    def take(self, timeout_s: float, memory_gib: float | None = None) -> Iterator[PassContext]:
        pair = self._pair(worker_memory(memory_gib))
        for worker in pair:
            worker.timeout_s = timeout_s
        try:
            with tempfile.TemporaryDirectory(prefix="onnxline-") as folder:
                yield PassContext(pair[0], Path(folder), pair[1])
        finally:
            with self._lock:
                keeps = self._open
                if keeps:
                    self._idle.append(pair)
            if not keeps:
                _close(pair)

    def _pair(self, limit: int) -> Pair:
        """An idle pair with this memory limit, which a process cannot change later; else a new pair."""
        with self._lock:
            idle = next((pair for pair in self._idle if pair[0].memory_bytes == limit), None)
            if idle is None:
                return Worker(memory_bytes=limit), Worker(memory_bytes=limit)
            self._idle.remove(idle)
            return idle

    def open(self) -> None:
        """Keep idle workers for the next call."""
        self._open = True

    def close(self) -> None:
        """End idle workers; busy ones end with their call."""
        with self._lock:
            self._open = False
            idle, self._idle = self._idle, []
        for pair in idle:
            _close(pair)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._not_ours += self._idle  # a reference stays: dropping them would close the parent's processes
        self._idle = []


def _close(pair: Pair) -> None:
    for worker in pair:
        worker.close()
