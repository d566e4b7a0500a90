"""ONNX → ONNX: policies that hold against any optimizer, and proof after every pass. Knows no torch, no pipeline."""

from __future__ import annotations

from passes.errors import ModelMistake, PassError, PolicyMistake
from passes.guard import guard
from passes.optimize import optimize
from passes.result import PassRow, PassRun, Status, StructureVerdict
from passes.why import Origin, WeightOrigin, why, why_weights

__all__ = [
    "ModelMistake",
    "Origin",
    "PassError",
    "PassRow",
    "PassRun",
    "PolicyMistake",
    "Status",
    "StructureVerdict",
    "WeightOrigin",
    "guard",
    "optimize",
    "why",
    "why_weights",
]
