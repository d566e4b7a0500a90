"""ONNX element types by the IR's dtype names, and back."""

from __future__ import annotations

from onnx import TensorProto

from pipeline.errors import Unsupported

__all__ = ["dtype_name", "element_type"]


def dtype_name(element: int, where: str) -> str:
    """The IR's name of an ONNX element type, e.g. 1 → "float32"; `where` is for the message.

    Raises:
        Unsupported: strings, and types of less than a byte.
    """
    if element not in NAMES:
        found = TensorProto.DataType.Name(element) if element in TensorProto.DataType.values() else str(element)
        raise Unsupported(
            f"{where} has the ONNX element type {found}, expected one of {', '.join(NAMES.values())}; cast or drop it"
        )
    return NAMES[element]


def element_type(dtype: str) -> int:
    """The ONNX element type of one of the IR's dtype names."""
    return ELEMENTS[dtype]


NAMES: dict[int, str] = {
    TensorProto.BOOL: "bool",
    TensorProto.UINT8: "uint8",
    TensorProto.INT8: "int8",
    TensorProto.UINT16: "uint16",
    TensorProto.INT16: "int16",
    TensorProto.UINT32: "uint32",
    TensorProto.INT32: "int32",
    TensorProto.UINT64: "uint64",
    TensorProto.INT64: "int64",
    TensorProto.FLOAT8E4M3FN: "float8_e4m3fn",
    TensorProto.FLOAT8E4M3FNUZ: "float8_e4m3fnuz",
    TensorProto.FLOAT8E5M2: "float8_e5m2",
    TensorProto.FLOAT8E5M2FNUZ: "float8_e5m2fnuz",
    TensorProto.BFLOAT16: "bfloat16",
    TensorProto.FLOAT16: "float16",
    TensorProto.FLOAT: "float32",
    TensorProto.DOUBLE: "float64",
    TensorProto.COMPLEX64: "complex64",
    TensorProto.COMPLEX128: "complex128",
}

ELEMENTS: dict[str, int] = {name: element for element, name in NAMES.items()}
