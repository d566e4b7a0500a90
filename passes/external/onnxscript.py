"""onnxscript's optimizer: constant folding, dead-code removal and function inlining in Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from passes.base import Workbench
from passes.external.files import through_files
from passes.weights import DetachedModel

__all__ = ["OnnxScriptOptimizer", "optimize"]


@dataclass(frozen=True, slots=True)
class OnnxScriptOptimizer:
    """Run `onnxscript.optimizer.optimize`; options are its keyword arguments."""

    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = field(default="onnxscript", init=False)
    source: str = field(default="onnxscript", init=False)

    def apply(self, model: DetachedModel, bench: Workbench) -> DetachedModel:
        return through_files(model, bench, "passes.external.onnxscript:optimize", self.options)


def optimize(source: str, target: str, options: dict[str, Any]) -> None:
    """In the worker: optimize the file `source` into the file `target`."""
    import onnx_ir
    import onnxscript.optimizer

    model = onnx_ir.load(source)
    onnxscript.optimizer.optimize(model, **options)
    onnx_ir.save(model, target, external_data="after.onnx.data")
