"""onnxoptimizer: one of its passes a step, on the detached model, since none of them computes with weights."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx

from passes.base import Workbench
from passes.weights import DetachedModel

__all__ = ["OnnxOptimizerPass", "available", "default_set", "optimize"]


@dataclass(frozen=True, slots=True)
class OnnxOptimizerPass:
    """Run one named pass of onnxoptimizer once."""

    name: str
    source: str = field(default="onnxoptimizer", init=False)

    def apply(self, model: DetachedModel, bench: Workbench) -> DetachedModel:
        result = bench.worker.call(
            "passes.external.onnxoptimizer:optimize", model=model.proto.SerializeToString(), name=self.name
        )
        return model.with_proto(onnx.load_from_string(result))


def available() -> tuple[str, ...]:
    """Every pass of the installed release."""
    import onnxoptimizer

    return tuple(onnxoptimizer.get_available_passes())


def default_set() -> tuple[str, ...]:
    """The fuse-and-eliminate set that `default` stands for, in the library's order."""
    import onnxoptimizer

    return tuple(onnxoptimizer.get_fuse_and_elimination_passes())


def optimize(model: bytes, name: str) -> bytes:
    """In the worker: run pass `name` on a serialized model."""
    import onnxoptimizer

    return onnxoptimizer.optimize(onnx.load_from_string(model), [name]).SerializeToString()
