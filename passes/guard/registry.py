"""The active guards of this process, and what an intercepted function does with a call.

This is the only global state of the package: a process has each function of an optimizer once, so a guard applies to
all of its threads."""

from __future__ import annotations

import atexit
import inspect
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final

from passes.guard.call_log import warn
from passes.guard.calls import TARGETS, Target
from passes.guard.handle_call import WorkerPool, handle
from passes.guard.patching import Interception, intercept, is_intercepted, restore
from passes.guard.settings import BorrowedEnvironment, Settings, guards_in, variables_of
from passes.guard.startup.hooks import LAUNCHES, LIBRARIES, AfterImport

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
    """Activate a guard, in every thread and in children started from now on."""
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
        """Watch for children, and for libraries that are imported from now on."""
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
        package = sys.modules.get(name.partition(".")[0])
        if name not in LIBRARIES and getattr(getattr(package, "__spec__", None), "_initializing", False):
            return  # handled when the whole package is imported
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


_REGISTRY: Final = _GuardRegistry()
_TARGETS: Final = {target.key: target for target in TARGETS}
