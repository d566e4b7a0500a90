"""The two that judge numbers: onnxruntime without graph optimization, and ONNX's reference evaluator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx

from passes.audit.words import steady
from passes.proof.numbers import compare, same_bits

__all__ = ["RUNTIMES", "differs"]

NEWEST_IR: Final = 10
"""Of a file format that every supported onnxruntime reads; models are shown to it as of this one."""


def _onnxruntime(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> list[Any]:
    import onnxruntime

    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    shown.ir_version = min(shown.ir_version, NEWEST_IR)
    settings = onnxruntime.SessionOptions()
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    settings.log_severity_level = 4
    settings.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(shown.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    results: Any = session.run(None, dict(feeds))
    return results


def _reference(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> list[Any]:
    from onnx.reference import ReferenceEvaluator

    with np.errstate(all="ignore"):
        results: Any = ReferenceEvaluator(model).run(None, dict(feeds))
        return list(results)


RUNTIMES: Final[Mapping[str, Callable[[onnx.ModelProto, Mapping[str, Any]], list[Any]]]] = {
    "onnxruntime": _onnxruntime,
    "onnx": _reference,
}
"""In the order in which they are asked; the first that computes what a case expects judges it."""


def differs(expected: Sequence[Any], got: Sequence[Any], rtol: float | None, atol: float | None) -> str:
    """How `got` is not what was expected, in words; empty when it is."""
    if len(expected) != len(got):
        return f"{len(got)} outputs, expected {len(expected)}"
    return next((why for pair in zip(expected, got, strict=True) if (why := _differs(*pair, rtol, atol))), "")


def _differs(expected: Any, got: Any, rtol: float | None, atol: float | None) -> str:
    if expected is None or got is None:
        return "" if expected is got else "an output is None on one side only"
    if isinstance(expected, list) or isinstance(got, list):
        if not (isinstance(expected, list) and isinstance(got, list)):
            return "a sequence on one side only"
        return differs(expected, got, rtol, atol)
    left, right = np.asarray(expected), np.asarray(got)
    if left.shape != right.shape:
        return f"shape {list(right.shape)}, expected {list(left.shape)}"
    if left.dtype.kind in "OUS" and right.dtype.kind in "OUS":
        return "" if _texts(left) == _texts(right) else "other strings"
    if left.dtype != right.dtype:
        return f"dtype {right.dtype}, expected {left.dtype}"
    if same_bits(left, right):
        return ""
    return _numbers(left, right, rtol, atol)


def _numbers(left: np.ndarray, right: np.ndarray, rtol: float | None, atol: float | None) -> str:
    if rtol is None or atol is None:
        errors = compare(left, right)
        return "" if errors.ok else (f"max error {errors.max_abs:.1g}" if errors.limit else steady(errors.why))
    kind = np.complex128 if left.dtype.kind == "c" else np.float64
    one, other = left.astype(kind), right.astype(kind)
    with np.errstate(all="ignore"):
        if np.allclose(other, one, rtol=rtol, atol=atol, equal_nan=True):
            return ""
        finite = np.isfinite(one) & np.isfinite(other)
        if not np.array_equal(one[~finite], other[~finite], equal_nan=True):
            return "NaN or infinity on one side only"
        return f"max error {np.abs(one - other)[finite].max(initial=0.0):.1g}"


def _texts(array: np.ndarray) -> list[str]:
    return [one.decode() if isinstance(one, bytes) else str(one) for one in array.ravel().tolist()]
