"""What is intercepted: one row a function."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

from passes.guard.calls.base import Call
from passes.guard.calls.onnxoptimizer import read_optimize
from passes.guard.calls.onnxsim import read_simplify
from passes.guard.calls.onnxslim import read_slim
from passes.guard.calls.simplify_path import read_simplify_path

__all__ = ["TARGETS", "Target"]

Reader = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Call]


@dataclass(frozen=True, slots=True)
class Target:
    """`key` is how the log calls the function, which is `attribute` of `module` in `package`."""

    key: str
    package: str
    module: str
    attribute: str
    read: Reader
    required: bool = True
    """Every release that we know has it, as a Python function. The others are intercepted where there is one."""

    def found(self) -> Callable[..., Any] | None:
        """The function, if the installed release has it."""
        try:
            return reduce(getattr, self.attribute.split("."), importlib.import_module(self.module))  # type: ignore[return-value]
        except (ImportError, AttributeError):
            return None


NATIVE: Final = "onnxsim.onnxsim_cpp2py_export"

TARGETS: Final = (
    Target("onnxsim.simplify", "onnxsim", "onnxsim", "simplify", read_simplify),
    Target("onnxsim.onnx_simplifier.simplify", "onnxsim", "onnxsim.onnx_simplifier", "simplify", read_simplify, False),
    Target("onnxsim.simplify_path", "onnxsim", "onnxsim", "simplify_path", read_simplify_path, False),
    Target(f"{NATIVE}.simplify_path", "onnxsim", NATIVE, "simplify_path", read_simplify_path, False),
    Target("onnxoptimizer.optimize", "onnxoptimizer", "onnxoptimizer", "optimize", read_optimize),
    Target("onnxslim.slim", "onnxslim", "onnxslim", "slim", read_slim),
)
"""A command of a library calls its function. Two names of one function are one door, and the first names it."""
