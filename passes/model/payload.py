"""Whether a tensor holds as many numbers as its shape says. What reads it later takes that for granted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
from onnx import TensorProto, helper

from passes.errors import ModelMistake

__all__ = ["byte_count", "check_payload"]

PACKED_BITS: Final[Mapping[str, int]] = {"UINT4": 4, "INT4": 4, "FLOAT4E2M1": 4, "UINT2": 2, "INT2": 2}
"""Dtypes of which several elements share a byte."""

UNCHECKED: Final = frozenset({"FLOAT6E2M3", "FLOAT6E3M2"})
"""Dtypes whose layout no release of onnx has settled yet."""


def byte_count(tensor: TensorProto) -> int:
    """Bytes of `tensor` as ONNX `raw_data`, by its dims and dtype.

    Raises:
        ModelMistake: a dim is negative, or the dtype is unknown.
    """
    elements, bits = _elements(tensor), PACKED_BITS.get(_dtype_name(tensor))
    if bits is not None:
        return -(-elements * bits // 8)
    return elements * np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type)).itemsize


def check_payload(tensor: TensorProto) -> None:
    """Refuse a tensor with inline data that does not fill its shape. External data is checked where it is mapped.

    Raises:
        ModelMistake: naming the tensor, what it holds and what it should hold.
    """
    name = _dtype_name(tensor)
    if tensor.data_location == TensorProto.EXTERNAL or name in UNCHECKED:
        return
    if tensor.HasField("raw_data") and tensor.data_type != TensorProto.STRING:
        found, expected, unit = len(tensor.raw_data), byte_count(tensor), "bytes"
    else:
        found = len(getattr(tensor, helper.tensor_dtype_to_field(tensor.data_type)))
        expected, unit = _entries(tensor, name), "entries"
    if found != expected:
        raise ModelMistake(
            f"tensor {tensor.name!r} holds {found} {unit}, but as {name.lower()}{list(tensor.dims)} it takes "
            f"{expected}; is the file complete?"
        )


def _entries(tensor: TensorProto, name: str) -> int:
    """Entries of the typed field: a complex number takes two, and what is packed is counted by the byte."""
    if name in PACKED_BITS:
        return byte_count(tensor)
    return _elements(tensor) * (2 if name.startswith("COMPLEX") else 1)


def _elements(tensor: TensorProto) -> int:
    if any(dim < 0 for dim in tensor.dims):
        raise ModelMistake(f"tensor {tensor.name!r} has the shape {list(tensor.dims)}; expected no negative dims")
    return math.prod(tensor.dims)


def _dtype_name(tensor: TensorProto) -> str:
    known = TensorProto.DataType.values()
    if tensor.data_type not in known or tensor.data_type == TensorProto.UNDEFINED:
        raise ModelMistake(f"tensor {tensor.name!r} has the dtype {tensor.data_type}, which ONNX does not know")
    return TensorProto.DataType.Name(tensor.data_type)
