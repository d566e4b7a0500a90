"""Whether a tensor holds as many numbers as its shape says. What reads it later takes that for granted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
from onnx import TensorProto, helper

from passes.errors import ModelError
from passes.load.budget import MOST_ELEMENTS, element_count

__all__ = ["byte_count", "check_payload", "dtype_of", "item_bits"]

PACKED_BITS: Final[Mapping[str, int]] = {"UINT4": 4, "INT4": 4, "FLOAT4E2M1": 4, "UINT2": 2, "INT2": 2}
"""Dtypes of which several elements share a byte."""

UNCHECKED: Final = frozenset({"FLOAT6E2M3", "FLOAT6E3M2"})
"""Dtypes whose layout no release of onnx has settled yet."""

MOST_DIMS: Final = 64
"""Of one tensor: numpy has no more."""

DTYPES: Final[Mapping[int, str]] = {number: name for name, number in TensorProto.DataType.items() if number}
FIELDS: Final = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")


def byte_count(tensor: TensorProto) -> int:
    """Bytes of `tensor` as ONNX `raw_data`, by its dims and dtype.

    Raises:
        ModelError: a dim is negative, or the dtype is unknown.
    """
    return -(-_elements(tensor) * item_bits(dtype_of(tensor)) // 8)


def check_payload(tensor: TensorProto, *, may_be_empty: bool = False) -> None:
    """Refuse a tensor with inline data that does not fill its shape, or with data in two places.

    External data is checked where it is mapped.

    Args:
        may_be_empty: a tensor without any data is a weight that was left out, and not a mistake.

    Raises:
        ModelError: naming the tensor, what it holds and what it should hold.
    """
    name = dtype_of(tensor)
    if tensor.HasField("segment"):
        raise ModelError(
            f"tensor {tensor.name!r} is one segment of a larger tensor, which nothing reads; save it in one piece"
        )
    held = [field for field in FIELDS if getattr(tensor, field)]
    raw_bytes = len(tensor.raw_data) if tensor.HasField("raw_data") else 0  # looked at once: protobuf hands out copies
    if raw_bytes or (not held and tensor.HasField("raw_data")):
        held.append("raw_data")
    if tensor.data_location == TensorProto.EXTERNAL:
        if held:
            raise ModelError(f"tensor {tensor.name!r} has its data in a file, and in {held[0]} too; expected one place")
        _elements(tensor)
        return
    expected_field = "raw_data" if held == ["raw_data"] and name != "STRING" else field_of(name)
    if strange := [field for field in held if field != expected_field]:
        raise ModelError(
            f"tensor {tensor.name!r} of {name.lower()} has its data in {' and '.join(held)}; expected {expected_field} "
            f"alone, and no {strange[0]}"
        )
    if name in UNCHECKED or (may_be_empty and not held):
        _elements(tensor)
        return
    if expected_field == "raw_data":
        found, expected, unit = raw_bytes, byte_count(tensor), "bytes"
    else:
        found, expected, unit = len(getattr(tensor, expected_field)), _entries(tensor, name), "entries"
    if found != expected:
        raise ModelError(
            f"tensor {tensor.name!r} holds {found} {unit}, but as {name.lower()}{list(tensor.dims)} it takes "
            f"{expected}; is the file complete?"
        )


def dtype_of(tensor: TensorProto) -> str:
    """ONNX's name of the dtype.

    Raises:
        ModelError: it has none.
    """
    name = DTYPES.get(tensor.data_type)
    if name is None:
        raise ModelError(f"tensor {tensor.name!r} has the dtype {tensor.data_type}, which ONNX does not know")
    return name


def item_bits(dtype: str) -> int:
    """Bits of one element in `raw_data`; a string counts as the reference to it that numpy holds."""
    if dtype in PACKED_BITS:
        return PACKED_BITS[dtype]
    if dtype in UNCHECKED:
        return 6
    return 8 * np.dtype(helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(dtype))).itemsize


def field_of(dtype: str) -> str:
    """The typed field of TensorProto for a dtype by ONNX's name."""
    return "int32_data" if dtype in UNCHECKED else helper.tensor_dtype_to_field(TensorProto.DataType.Value(dtype))


def _entries(tensor: TensorProto, name: str) -> int:
    """Entries of the typed field: a complex number takes two, and what is packed is counted by the byte."""
    if name in PACKED_BITS:
        return byte_count(tensor)
    return _elements(tensor) * (2 if name.startswith("COMPLEX") else 1)


def _elements(tensor: TensorProto) -> int:
    dims = tensor.dims
    if any(dim < 0 for dim in dims):
        raise ModelError(f"tensor {tensor.name!r} has the shape {list(dims)}; expected no negative dims")
    if len(dims) > MOST_DIMS:
        raise ModelError(f"tensor {tensor.name!r} has {len(dims)} dims; expected {MOST_DIMS} at most")
    if element_count(dims) > MOST_ELEMENTS:
        raise ModelError(
            f"tensor {tensor.name!r} has the shape {list(dims)}, which no machine can hold; is a dim wrong?"
        )
    return math.prod(dims)
