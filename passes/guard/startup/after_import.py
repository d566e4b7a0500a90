"""Wait for a library to be imported. Only what Python has loaded at its start is used."""

from __future__ import annotations

import importlib.machinery
import sys

TYPE_CHECKING = False  # not typing's, which is slow to load
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

__all__ = ["LIBRARIES", "AfterImport"]

LIBRARIES = ("onnxsim", "onnxoptimizer", "onnxslim")


class AfterImport:
    """A finder that finds nothing itself: it lets the others find, and calls `then(name)` once the module is loaded, or
    loaded again. It waits for the modules `names` and all that is in them."""

    only_waits = True
    """Two of them would ask each other for ever."""

    def __init__(self, names: Sequence[str], then: Callable[[str], object]) -> None:
        self._names = frozenset(names)
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self._names:
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
