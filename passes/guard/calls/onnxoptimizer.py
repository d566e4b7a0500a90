"""`onnxoptimizer.optimize`: each of the passes alone, so that each change has an author."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from passes.base import Repeat, Workbench
from passes.external.onnxoptimizer import available, default_set, passes_of
from passes.guard.calls.arguments import bound
from passes.guard.calls.base import LetThrough, Plan, Skips
from passes.guard.calls.models import copied, whole
from passes.model.weights import DetachedModel

__all__ = ["OnnxOptimizerCall", "optimize", "read_optimize"]


@dataclass(frozen=True, slots=True)
class OnnxOptimizerCall:
    model: DetachedModel
    names: tuple[str, ...]
    fixed_point: bool
    source: str = ""
    feeds: tuple[Mapping[str, np.ndarray], ...] = ()
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def plan(self, skips: Skips, bench: Workbench) -> Plan:
        skipped = {name: skip.reason for name in self.names if (skip := skips(name))}
        names = tuple(name for name in self.names if name not in skipped)
        steps = passes_of(names)
        return Plan((Repeat(steps),) if self.fixed_point else steps, skipped)

    def plan_here(self, skips: Skips, bench: Workbench) -> Plan | None:
        return None  # the library has nothing that a script could register

    def unguarded(self, bench: Workbench) -> DetachedModel:
        result = bench.worker.call(
            "passes.guard.calls.onnxoptimizer:optimize",
            model=self.model.proto.SerializeToString(),
            names=list(self.names),
            fixed_point=self.fixed_point,
        )
        return self.model.with_proto(onnx.load_from_string(result))

    def deliver(self, model: DetachedModel, *, proven: bool) -> onnx.ModelProto:
        return whole(model)


def read_optimize(original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> OnnxOptimizerCall:
    """Understand a call of `onnxoptimizer.optimize(model, passes=None, fixed_point=False) -> ModelProto`."""
    given = bound(original, args, kwargs)
    model, names = given["model"], given.get("passes")
    if not isinstance(model, onnx.ModelProto):
        raise LetThrough(f"optimize does not take a model of type {type(model).__name__}")
    if names is None:
        names = default_set()
    known = available()
    if not isinstance(names, list | tuple) or any(name not in known for name in names):
        raise LetThrough(f"not all of {names!r} are passes of this onnxoptimizer", lambda: model)
    return OnnxOptimizerCall(copied(model, lambda: model), tuple(names), bool(given.get("fixed_point")))


def optimize(model: bytes, names: list[str], fixed_point: bool) -> bytes:
    """In the worker: run several passes on a serialized model, as one call."""
    import onnxoptimizer

    return onnxoptimizer.optimize(onnx.load_from_string(model), names, fixed_point).SerializeToString()
