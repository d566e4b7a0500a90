"""ONNX → ONNX: policies that hold against any optimizer, and proof after every pass. Knows no torch, no pipeline."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from passes.doors import open_door

if TYPE_CHECKING:
    from passes.errors import ModelError as ModelError
    from passes.errors import OnnxlineError as OnnxlineError
    from passes.errors import PassError as PassError
    from passes.errors import PolicyError as PolicyError
    from passes.guard import guard as guard
    from passes.optimize import optimize as optimize
    from passes.run.result import OptimizeResult as OptimizeResult
    from passes.run.result import PassRow as PassRow
    from passes.run.result import PassRun as PassRun
    from passes.run.result import Status as Status
    from passes.run.result import StructureVerdict as StructureVerdict
    from passes.why import Origin as Origin
    from passes.why import WeightOrigin as WeightOrigin
    from passes.why import why as why
    from passes.why import why_weights as why_weights
else:
    __all__, __getattr__ = open_door(__name__, __file__)


class _LazyPackage(ModuleType):
    """Keeps its functions: Python stores each imported submodule here, and three have the name of their function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in self.__all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _LazyPackage

# onnxruntime sends telemetry, and reads this variable when it is imported, by us or by a library that we call; child
# processes inherit it. All of our code, in each process, comes through here first. A value that the user set is kept.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
