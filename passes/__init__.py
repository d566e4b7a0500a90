"""ONNX → ONNX: policies that hold against any optimizer, and proof after every pass. Knows no torch, no pipeline."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from passes.errors import ModelMistake, PassError, PolicyMistake
    from passes.guard import guard
    from passes.optimize import optimize
    from passes.result import PassRow, PassRun, Status, StructureVerdict
    from passes.why import Origin, why

__all__ = [
    "ModelMistake",
    "Origin",
    "PassError",
    "PassRow",
    "PassRun",
    "PolicyMistake",
    "Status",
    "StructureVerdict",
    "guard",
    "optimize",
    "why",
]

HOMES: Final = {
    **dict.fromkeys(("ModelMistake", "PassError", "PolicyMistake"), "errors"),
    **dict.fromkeys(("PassRow", "PassRun", "Status", "StructureVerdict"), "result"),
    **dict.fromkeys(("Origin", "why"), "why"),
    "guard": "guard",
    "optimize": "optimize",
}
"""Name → the module that has it. Each is imported when somebody asks for it: the command line imports some module of
`passes` to say what is wrong with a name, and onnx takes half a second."""


class _Package(ModuleType):
    """`passes` itself. An import of the module `passes.optimize` must not replace the function of that name."""

    def __getattr__(self, name: str) -> Any:
        if name not in HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, getattr(value, name) if name in HOMES and isinstance(value, ModuleType) else value)


sys.modules[__name__].__class__ = _Package
