"""The first thing that a Python child of a guard runs: wait for an optimizer to be imported, then guard it.

Python imports a module of this name at its start. Only the standard library is used, and only what is loaded by then,
so a child that never touches an optimizer pays nothing. A `sitecustomize` that this one hides is run as well.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

__all__ = ["AFTER", "FOLDER", "LIBRARIES", "VARIABLE", "AfterImport", "begin"]

VARIABLE = "ONNXLINE_GUARD"
"""The environment variable that tells a child what to guard, as JSON; see `passes.guard.settings`."""

FOLDER = os.path.dirname(__file__)  # noqa: PTH120 - pathlib is not loaded yet
"""What is put on PYTHONPATH."""

LIBRARIES = ("onnxsim", "onnxoptimizer", "onnxslim")

AFTER = "passes.guard.inherited"
"""The module whose `begin()` starts the guard that the environment asks for."""


class AfterImport:
    """A finder that finds nothing itself: it lets the others find, and calls `then(name)` once the module is loaded."""

    only_waits = True
    """Two of them would ask each other for ever. This file may be loaded twice, so the class does not tell."""

    def __init__(self, names: Sequence[str], then: Callable[[str], object]) -> None:
        self._names = frozenset(names)
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._names:
            return None
        for finder in list(sys.meta_path):
            if getattr(finder, "only_waits", False) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._follow(name, spec)
                return spec
        return None

    def _follow(self, name: str, spec: importlib.machinery.ModuleSpec) -> None:
        loader = spec.loader
        load = getattr(loader, "exec_module", None)
        if loader is None or load is None:
            return

        def exec_module(module: ModuleType) -> None:
            load(module)
            self._then(name)

        loader.exec_module = exec_module  # type: ignore[method-assign]  # of this loader, which loads this module only


def begin() -> None:
    """Run the hidden `sitecustomize`, and wait for the libraries if the environment names a guard."""
    sys.path[:] = [entry for entry in sys.path if entry != FOLDER]  # children get it from the environment
    hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if hidden is not None and hidden.loader is not None:
        module = importlib.util.module_from_spec(hidden)
        sys.modules["sitecustomize"] = module
        hidden.loader.exec_module(module)
    if VARIABLE in os.environ and sys.orig_argv[1:3] != ["-m", "passes.worker"]:  # where the guard itself works
        sys.meta_path.insert(0, AfterImport(LIBRARIES, _guard))  # type: ignore[arg-type]


def _guard(name: str) -> None:
    if VARIABLE not in os.environ:
        return
    try:
        importlib.import_module(AFTER).begin()
    except ImportError as error:
        raise ImportError(
            f"onnxline guard: {sys.executable} imports {name} and has no onnxline that works ({error}), so nothing "
            "that it does can be guarded; install onnxline there"
        ) from error


if __name__ == "sitecustomize":
    begin()
