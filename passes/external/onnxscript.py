"""onnxscript's optimizer: one composite step of folding, rules, inlining and common subexpressions, in Python."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Final

from passes.context import PassContext
from passes.external.installed import ask, refuse_unknown, refuse_wrong_values
from passes.external.onnxscript_rules import matching_in_linear_time
from passes.external.rebind import rebound
from passes.external.through_ir import through_ir
from passes.model.weights import DetachedModel
from passes.step import CompositeStep

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["OnnxScriptOptimizer", "facts", "hints", "optimize"]

STAGES: Final[Mapping[str, tuple[str, str]]] = {
    "inline": ("onnx_ir.passes.common", "InlinePass"),
    "constant_folding": ("onnxscript.optimizer._constant_folding", "FoldConstantsPass"),
    "rewrite_rules": ("onnxscript.rewriter", "RewritePass"),
    "common_subexpression_elimination": ("onnx_ir.passes.common", "CommonSubexpressionEliminationPass"),
}
"""Inner pass → module and class. One that is left out is replaced by a pass that does nothing; the rules one by one are
the step `onnxscript_rewrites`."""

SHAPES: Final = "shape_inference"
"""An inner pass too; the option `onnx_shape_inference` leaves it out."""


@dataclass(frozen=True, slots=True)
class OnnxScriptOptimizer(CompositeStep):
    """Run `onnxscript.optimizer.optimize`; options are its keyword arguments."""

    options: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    name: str = field(default="onnxscript", init=False)
    source: str = field(default="onnxscript", init=False)
    suspects: ClassVar[tuple[str, ...]] = ("constant_folding", SHAPES)

    def apply(self, model: DetachedModel, bench: PassContext) -> DetachedModel:
        options = {**self.options, "left_out": list(self.left_out)}
        return through_ir(model, bench, "passes.external.onnxscript:optimize", options)

    def inner(self, bench: PassContext) -> tuple[str, ...]:
        off = {"inline": not self.options.get("inline", True)}
        off[SHAPES] = not self.options.get("onnx_shape_inference", True)
        names = ask(bench, "passes.external.onnxscript:facts", self.name)["passes"]
        return tuple(name for name in names if name not in self.left_out and not off.get(name))

    def check(self, bench: PassContext) -> None:
        """Refuse options that this release's optimize does not take.

        Raises:
            PolicyError: naming the nearest; or a value of another type.
        """
        if not self.options:
            return
        known = ask(bench, "passes.external.onnxscript:facts", self.name)["options"]
        refuse_unknown(self.options, known, "onnxscript.optimizer.optimize has no option")
        refuse_wrong_values(bench, "passes.external.onnxscript:hints", self.name, self.options)


@cache
def facts() -> dict[str, list[str]]:
    """In the worker: the stages and options of the installed release."""
    import onnxscript.optimizer

    there = [name for name, (module, kind) in STAGES.items() if hasattr(importlib.import_module(module), kind)]
    options = list(inspect.signature(onnxscript.optimizer.optimize).parameters)[1:]
    return {"passes": [*there, SHAPES], "options": options}


def hints() -> dict[str, Any]:
    """In the worker: option → the type that optimize declares; those of the simple types, since the others are names
    that only a type checker imports."""
    import onnxscript.optimizer

    declared = inspect.signature(onnxscript.optimizer.optimize).parameters
    return {name: SIMPLE[text] for name, one in declared.items() if (text := str(one.annotation)) in SIMPLE}


SIMPLE: Final[Mapping[str, type]] = {"int": int, "bool": bool, "str": str, "float": float}


def optimize(model: ir.Model, options: Mapping[str, Any]) -> None:
    """In the worker: optimize `model` in place, without the stages in `left_out`."""
    import onnx_ir
    import onnxscript.optimizer

    class Nothing(onnx_ir.passes.InPlacePass):
        """Takes the place of a pass that is left out."""

        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

        def call(self, model: onnx_ir.Model) -> onnx_ir.passes.PassResult:
            return onnx_ir.passes.PassResult(model, False)

    given = {name: value for name, value in options.items() if name != "left_out"}
    left_out = options["left_out"]
    if SHAPES in left_out:
        given["onnx_shape_inference"] = False
    stages = [STAGES[name] for name in left_out if name in STAGES]
    with (
        rebound((importlib.import_module(module), kind, Nothing) for module, kind in stages),
        matching_in_linear_time(),
    ):
        onnxscript.optimizer.optimize(model, **given)
