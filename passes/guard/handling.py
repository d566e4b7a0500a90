"""From an intercepted call to what it returns, and to its record in the journal."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from passes.context import PassContext
from passes.guard.benches import Benches
from passes.guard.calls.base import Call, LetThrough
from passes.guard.callsite import call_site
from passes.guard.enforce import Outcome, RefusedByOptimizer, enforce
from passes.guard.journal import write_call
from passes.guard.record import GuardedCall, Returned
from passes.guard.settings import Demands, Settings
from passes.guard.targets import Target

__all__ = ["handle"]


def handle(
    target: Target,
    original: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    guards: Sequence[Settings],
    benches: Benches,
) -> Any:
    """Make the call under `guards`, and return what the caller expects of it."""
    begun, demands, site = time.perf_counter(), Demands(tuple(guards)), call_site()
    blank = GuardedCall(
        *(target.key, site.file, site.line, site.caller),
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
    if isinstance(call, LetThrough):
        return let_through(str(call), call.instead)
    with benches.take(demands.timeout_s, demands.memory_gib) as bench:
        outcome = _enforced(call, demands, bench)
        if isinstance(outcome, RefusedByOptimizer):
            return let_through(str(outcome), lambda: call.deliver(call.model, proven=False))
        result = call.deliver(outcome.model, proven=outcome.proven)
        write(_filled(blank, call, outcome, demands))
        return result


def _read(
    target: Target, original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Call | LetThrough:
    try:
        return target.read(original, args, kwargs)
    except LetThrough as reason:
        return reason


def _enforced(call: Call, demands: Demands, bench: PassContext) -> Outcome | RefusedByOptimizer:
    try:
        return enforce(call, demands, bench)
    except RefusedByOptimizer as refusal:
        return refusal
    except Exception:  # ours: the script must not suffer, and nothing may be lost
        note = f"a bug of onnxline, please report it: {traceback.format_exc()}"
        return Outcome(call.model, Returned.AS_GIVEN, False, notes=(note,))


def _filled(blank: GuardedCall, call: Call, outcome: Outcome, demands: Demands) -> GuardedCall:
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
