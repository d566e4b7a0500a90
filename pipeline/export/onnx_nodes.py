"""What the forms in ONNX are written with: a call adds a node to torch's graph, and lists of integers are constants."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from onnxscript import ir
from onnxscript.onnx_opset import opset18

op: Final[Any] = opset18
"""Typed as Any: its annotations are for eager evaluation."""


def constant(array: np.ndarray) -> Any:
    return op.Constant(value=ir.tensor(array))


def double(value: Any) -> Any:
    """A number, or an array, in float64."""
    return op.Constant(value=ir.tensor(value, ir.DataType.DOUBLE))
