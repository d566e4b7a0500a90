"""Translations of our own operators that round: `onnxline.quantize` and `onnxline.dequantize` to ONNX's."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from onnxscript import ir
from onnxscript.onnx_opset import opset18

op: Final[Any] = opset18


def translate_quantize(self: Any, scale: Any, zero_point: Any = None, *, to: str, axis: int = 1) -> Any:
    """To int8 or uint8, with one scale, or one for each index of an axis; other arguments have no translation."""
    return op.QuantizeLinear(self, scale, _zeros(scale, to) if zero_point is None else zero_point, axis=axis)


def translate_dequantize(self: Any, scale: Any, zero_point: Any = None, *, to: str, axis: int = 1) -> Any:
    """To the dtype of the scales; see `translate_quantize`."""
    del to
    zero = _zeros(scale, str(self.dtype).lower()) if zero_point is None else zero_point
    return op.DequantizeLinear(self, scale, zero, axis=axis)


def _zeros(scale: Any, dtype: str) -> Any:
    return op.Constant(value=ir.tensor(np.zeros([int(size) for size in scale.shape], dtype)))
