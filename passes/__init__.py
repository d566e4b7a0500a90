"""ONNX → ONNX: policies that hold against any optimizer, and proof after every pass. Knows no torch, no pipeline."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from passes.errors import ModelError, OnnxlineError, PassError, PolicyError
    from passes.guard import guard
    from passes.optimize import optimize
    from passes.run.result import OptimizeResult, PassRow, PassRun, Status, StructureVerdict
    from passes.why import Origin, WeightOrigin, why, why_weights

__all__ = [
    "ModelError",
    "OnnxlineError",
    "OptimizeResult",
    "Origin",
    "PassError",
    "PassRow",
    "PassRun",
    "PolicyError",
    "Status",
    "StructureVerdict",
    "WeightOrigin",
    "guard",
    "optimize",
    "why",
    "why_weights",
]

HOMES: Final = {
    "errors": ("ModelError", "OnnxlineError", "PassError", "PolicyError"),
    "guard": ("guard",),
    "optimize": ("optimize",),
    "run.result": ("OptimizeResult", "PassRow", "PassRun", "Status", "StructureVerdict"),
    "why": ("Origin", "WeightOrigin", "why", "why_weights"),
}


class _LazyPackage(ModuleType):
    """Loads each public name when it is first used: a part of `passes`, such as its errors, must not load onnx."""

    def __getattr__(self, name: str) -> Any:
        home = next((module for module, names in HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{home}"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Python stores each imported submodule here; three of them have the name of their public function.
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _LazyPackage

# onnxruntime sends telemetry, and reads this variable when it is imported, by us or by a library that we call; child
# processes inherit it. All of our code, in each process, comes through here first. A value that the user set is kept.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
