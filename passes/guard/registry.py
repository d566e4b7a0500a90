"""The active guards of this process, and what an intercepted function does with a call: run it under the policy, write
its record, and return its result.

This is the only global state of the package: a process has each function of an optimizer once, so a guard applies to
all of its threads. Calls run in workers that are reused, since importing an optimizer takes seconds; concurrent calls
have workers each.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from passes.context import PassContext, worker_memory
from passes.guard.call_log import GuardedCall, Returned, call_site, warn, write_call
from passes.guard.calls import TARGETS, Target
from passes.guard.calls.base import InterceptedCall, PassThrough
from passes.guard.enforce import Enforced, RefusedByOptimizer, enforce
from passes.guard.patching import Interception, intercept, is_intercepted, restore
from passes.guard.settings import BorrowedEnvironment, CombinedPolicy, Settings, guards_in, variables_of
from passes.guard.startup.hooks import LAUNCHES, LIBRARIES, AfterImport
from passes.worker.client import Worker

Function = Callable[..., Any]

_WORKING: ContextVar[bool] = ContextVar("onnxline_guard_working", default=False)
"""Set while a call is being handled: calls made meanwhile are our own, and not intercepted."""


def dispatch(key: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Handle a call of the intercepted function `key`, and return its result."""
    original, guards = _REGISTRY.originals[key], _REGISTRY.guards()
    if _WORKING.get() or not guards:
        return original(*args, **kwargs)
    token = _WORKING.set(True)
    try:
        return handle(_TARGETS[key], original, args, kwargs, guards, _REGISTRY.workers)
    finally:
        _WORKING.reset(token)


def enter(settings: Settings) -> None:
    """Activate a guard, in every thread and in children that are started later."""
    inherit()
    with _REGISTRY.lock:
        _REGISTRY.borrowed = _REGISTRY.borrowed or BorrowedEnvironment(os.environ)
        _REGISTRY.entered = (*_REGISTRY.entered, settings)
        _REGISTRY.borrowed.set_guards(_REGISTRY.guards())
        _REGISTRY.open()
    _REGISTRY.catch_up()


def leave(settings: Settings) -> None:
    """Deactivate a guard; the last one restores every function."""
    with _REGISTRY.lock:
        _REGISTRY.entered = tuple(active for active in _REGISTRY.entered if active is not settings)
        if _REGISTRY.borrowed is not None and _REGISTRY.entered:
            _REGISTRY.borrowed.set_guards(_REGISTRY.guards())
        elif _REGISTRY.borrowed is not None:
            _REGISTRY.borrowed.restore()
            _REGISTRY.borrowed = None
        if _REGISTRY.guards():
            _REGISTRY.open()
        else:
            _REGISTRY.close()


def inherit() -> None:
    """Activate the guards that the parent process set in the environment, if this process has none yet."""
    with _REGISTRY.lock:
        if not _REGISTRY.guards():
            _REGISTRY.inherited = guards_in(LAUNCHES.variables or os.environ)
            if _REGISTRY.inherited:
                _REGISTRY.open()
    _REGISTRY.catch_up()


class _GuardRegistry:
    """The active guards, and the functions that are intercepted for them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.inherited: tuple[Settings, ...] = ()
        self.entered: tuple[Settings, ...] = ()
        self.borrowed: BorrowedEnvironment | None = None
        self.workers = WorkerPool()
        self.interceptions: list[Interception] = []
        self.missing: set[str] = set()
        self.originals: dict[str, Function] = {}
        """Kept after the interceptions end: a thread may still be in one."""
        self._finder = AfterImport(LIBRARIES, self._on_loaded)
        if hasattr(os, "register_at_fork"):  # Windows has no fork
            os.register_at_fork(after_in_child=self._after_fork)
        atexit.register(self.workers.close)

    def guards(self) -> tuple[Settings, ...]:
        return (*self.inherited, *self.entered)

    def open(self) -> None:
        """Watch for children, and for libraries that are imported later."""
        self.workers.open()
        LAUNCHES.open(variables_of(self.guards()))
        if self._finder not in sys.meta_path:
            sys.meta_path.insert(0, self._finder)  # type: ignore[arg-type]

    def catch_up(self) -> None:
        """Intercept the libraries that are loaded. The lock is not held here: another thread that imports a library may
        wait for the lock while this one waits for the import."""
        for name in LIBRARIES:
            if name in sys.modules:
                self._on_loaded(name)

    def close(self) -> None:
        sys.meta_path.remove(self._finder)  # type: ignore[arg-type]
        LAUNCHES.close()
        for interception in reversed(self.interceptions):
            restore(interception)
        self.interceptions.clear()
        self.missing.clear()
        self.workers.close()

    def _on_loaded(self, name: str) -> None:
        """Intercept the functions of a library that was imported, or of its module that was loaded again."""
        functions = [(target, target.resolve()) for target in TARGETS if name in (target.package, target.module)]
        with self.lock:
            for target, function in functions:
                if self.guards():
                    self._guard(target, function)

    def _guard(self, target: Target, function: Function | None) -> None:
        if function is None:
            if target.required and target.key not in self.missing:
                self.missing.add(target.key)
                warn(f"this {target.package} has no {target.key}, so no call of it is guarded", self.guards())
        elif not is_intercepted(function):
            if target.required and not inspect.isfunction(function):
                warn(f"{target.key} is native here; only what modules hold of it is guarded", self.guards())
            self._intercept(target.key, function)

    def _intercept(self, key: str, function: Function) -> None:
        interception = intercept(key, function, dispatch)
        self.originals[key] = interception.original
        self.interceptions.append(interception)

    def _after_fork(self) -> None:
        self.lock = threading.RLock()


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
        *(target.key, *call_site()), *(os.getpid(), threading.current_thread().name, "", Returned.NOT_JUDGED)
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
        enforced = _enforce_safely(call, policy, context, blank)
        if isinstance(enforced, RefusedByOptimizer):
            return pass_through(str(enforced), lambda: call.deliver(call.model, proven=False))
        model, record = enforced
        result = call.deliver(model, proven=record.proof == "numbers")
        write(record)
        return result


def _read(
    target: Target, original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> InterceptedCall | PassThrough:
    try:
        return target.read(original, args, kwargs)
    except PassThrough as reason:
        return reason


def _enforce_safely(
    call: InterceptedCall, policy: CombinedPolicy, context: PassContext, blank: GuardedCall
) -> Enforced | RefusedByOptimizer:
    try:
        return enforce(call, policy, context, blank)
    except RefusedByOptimizer as refusal:
        return refusal
    except Exception:  # a bug of ours: the script goes on, with the model that came in
        note = f"a bug of onnxline, please report it: {traceback.format_exc()}"
        nodes = len(call.model.proto.graph.node)
        facts = {"model": call.source, "nodes_before": nodes, "nodes_after": nodes, "proof": "structure"}
        return call.model, replace(blank, returned=Returned.AS_GIVEN, notes=(note,), **facts)


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
                yield PassContext(pair[0], Path(folder), pair[1], run_advice="")
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


_REGISTRY: Final = _GuardRegistry()
_TARGETS: Final = {target.key: target for target in TARGETS}
