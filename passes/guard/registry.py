"""The guards that are in force in this process, and what an intercepted function does with a call.

The only state of the package, and it has to be one: the functions of the optimizers are there once in a process, so a
guard holds for all of its threads.
"""

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
from passes.guard.startup.hooks import LAUNCHES, LIBRARIES, AfterImport, register

__all__ = ["dispatch", "enter", "inherit", "leave"]

Function = Callable[..., Any]

_WORKING: ContextVar[bool] = ContextVar("onnxline_guard_working", default=False)
"""Set while a call is being handled: what is called meanwhile is ours, and not intercepted."""


def dispatch(key: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call of the function that `key` names returns."""
    original, guards = _REGISTRY.originals[key], _REGISTRY.guards()
    if _WORKING.get() or not guards:
        return original(*args, **kwargs)
    token = _WORKING.set(True)
    try:
        return handle(_TARGETS[key], original, args, kwargs, guards, _REGISTRY.workers)
    finally:
        _WORKING.reset(token)


def enter(settings: Settings) -> None:
    """From now on `settings` are in force, in every thread and in children that are started."""
    inherit()
    with _REGISTRY.lock:
        _REGISTRY.borrowed = _REGISTRY.borrowed or BorrowedEnvironment(os.environ)
        _REGISTRY.entered = (*_REGISTRY.entered, settings)
        _REGISTRY.borrowed.set_guards(_REGISTRY.guards())
        _REGISTRY.open()
    _REGISTRY.catch_up()
    register([settings.processes] if settings.processes else [])


def leave(settings: Settings) -> None:
    """`settings` are no more in force; with the last guard everything is as it was."""
    with _REGISTRY.lock:
        _REGISTRY.entered = tuple(one for one in _REGISTRY.entered if one is not settings)
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
    """Begin the guards that the environment asks for, if this process has none yet: those of the process before it."""
    with _REGISTRY.lock:
        if not _REGISTRY.guards():
            _REGISTRY.inherited = guards_in(LAUNCHES.variables or os.environ)
            if _REGISTRY.inherited:
                _REGISTRY.open()
    _REGISTRY.catch_up()


class _GuardRegistry:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.inherited: tuple[Settings, ...] = ()
        self.entered: tuple[Settings, ...] = ()
        self.borrowed: BorrowedEnvironment | None = None
        self.workers = WorkerPool()
        self.interceptions: list[Interception] = []
        self.missing: set[str] = set()
        self.originals: dict[str, Function] = {}
        """Outlives the interceptions: a thread may be in one just before it ends."""
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
        """Intercept what is loaded. Not under the lock: a library may be being imported by another thread,
        which then waits for the lock while we wait for the library."""
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
        """A library has been imported; or a module of it again, and that module's functions are new ones."""
        package = sys.modules.get(name.partition(".")[0])
        if name not in LIBRARIES and getattr(getattr(package, "__spec__", None), "_initializing", False):
            return  # the whole is dealt with at its end
        found = [(target, target.resolve()) for target in TARGETS if name in (target.package, target.module)]
        with self.lock:
            for target, function in found:
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
        register([one.processes for one in self.guards() if one.processes])


_REGISTRY: Final = _GuardRegistry()
_TARGETS: Final = {target.key: target for target in TARGETS}
