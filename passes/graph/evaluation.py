"""Compute a constant by ONNX's reference evaluator: what grows, or may not end, in a process with limits."""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx

from passes.errors import StepFailed
from passes.graph.op_facts import LAYOUT_OPS
from passes.worker.inference import call_limited

NEVER_GROW: Final = LAYOUT_OPS | {"Slice", "Split", "Cast", "DequantizeLinear"}
"""Operators whose outputs hold no more elements than their inputs, and take as long."""

MOST_SECONDS: Final = 10.0


def evaluate(model: onnx.ModelProto) -> np.ndarray | None:
    """The output of a model without inputs; None where the evaluator cannot compute it, or not within its limits."""
    try:
        if all(node.op_type in NEVER_GROW for node in model.graph.node):
            return compute(model.SerializeToString())
        return call_limited(compute, MOST_SECONDS, content=model.SerializeToString())
    except (StepFailed, ValueError):
        return None


def compute(content: bytes) -> np.ndarray | None:
    """`evaluate`, in this process.

    Raises:
        StepFailed: the evaluator lacks an operator, or fails.
    """
    from onnx.reference import ReferenceEvaluator  # a tenth of a second, which most runs do not need

    try:
        (values,) = ReferenceEvaluator(onnx.load_from_string(content)).run(None, {})
    except Exception as error:
        raise StepFailed(f"{type(error).__name__}: {error}") from error
    return values if isinstance(values, np.ndarray) else None
