"""What is intercepted: one row a function."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

from passes.guard.calls.base import Call
from passes.guard.calls.onnxoptimizer import (
    read_fixed_point,
    read_fixed_point_of_file,
    read_once,
    read_once_of_file,
    read_optimize,
)
from passes.guard.calls.onnxsim import read_simplify
from passes.guard.calls.onnxslim import read_graph, read_optimize_model, read_slim, read_slim_core
from passes.guard.calls.simplify_path import read_simplify_bytes, read_simplify_path

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


SIM: Final = "onnxsim.onnxsim_cpp2py_export"
OPT: Final = "onnxoptimizer.onnx_opt_cpp2py_export"
SLIM: Final = "onnxslim.core.optimization"

TARGETS: Final = (
    Target("onnxsim.simplify", "onnxsim", "onnxsim", "simplify", read_simplify),
    Target("onnxsim.onnx_simplifier.simplify", "onnxsim", "onnxsim.onnx_simplifier", "simplify", read_simplify, False),
    Target("onnxsim.simplify_path", "onnxsim", "onnxsim", "simplify_path", read_simplify_path, False),
    Target(f"{SIM}.simplify_path", "onnxsim", SIM, "simplify_path", read_simplify_path, False),
    Target(f"{SIM}.simplify", "onnxsim", SIM, "simplify", read_simplify_bytes, False),
    Target("onnxoptimizer.optimize", "onnxoptimizer", "onnxoptimizer", "optimize", read_optimize),
    Target(f"{OPT}.optimize", "onnxoptimizer", OPT, "optimize", read_once, False),
    Target(f"{OPT}.optimize_fixedpoint", "onnxoptimizer", OPT, "optimize_fixedpoint", read_fixed_point, False),
    Target(f"{OPT}.optimize_from_path", "onnxoptimizer", OPT, "optimize_from_path", read_once_of_file, False),
    Target(
        f"{OPT}.optimize_fixedpoint_from_path",
        *("onnxoptimizer", OPT, "optimize_fixedpoint_from_path"),
        read_fixed_point_of_file,
        False,
    ),
    Target("onnxslim.slim", "onnxslim", "onnxslim", "slim", read_slim),
    Target("onnxslim.core.optimize", "onnxslim", "onnxslim.core", "optimize", read_slim_core, False),
    Target(f"{SLIM}.optimize_model", "onnxslim", SLIM, "optimize_model", read_optimize_model, False),
    *(
        Target(f"{SLIM}.{name}", "onnxslim", SLIM, name, read_graph, False)
        for name in ("graph_fusion", "dead_node_elimination", "subexpression_elimination", "tie_weights")
    ),
)
"""A command of a library calls its function. Two names of one function are one door, and the first names it."""
