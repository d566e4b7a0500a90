"""A fingerprint of a model's structure, which is the same on every machine and for every set of weights."""

from __future__ import annotations

import math
from typing import Final

from onnx import TensorProto

from passes.model.canonical import read
from passes.model.weights import DetachedModel

__all__ = ["structure_fingerprint"]

SMALL: Final = 16
"""Elements below which a tensor is a shape, an axis or a scale, and counts by its values."""

DIGITS: Final = 5
"""Of floating-point values: libraries on other processors may round the last ones otherwise."""

LENGTH: Final = 12


def structure_fingerprint(model: DetachedModel) -> str:
    """12 hex digits that change when an op, an attribute, an edge, or the shape or dtype of a weight does.

    As for `Reading.canonical`, names and the order of independent nodes do not count. Weights count by shape and dtype;
    tensors of fewer than 16 elements by value.
    """
    return read(model, _told).canonical[:LENGTH]


def _told(model: DetachedModel, tensor: TensorProto) -> str:
    if math.prod(tensor.dims) >= SMALL or tensor.data_type == TensorProto.STRING:
        return ""
    values = model.array(tensor).ravel().tolist()
    return " ".join(f"{one:.{DIGITS}g}" if isinstance(one, float) else str(one) for one in values)
