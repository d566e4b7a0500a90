"""Types, tensors and attributes in words: as short as they can be read."""

from __future__ import annotations

from typing import Final

import numpy as np
from onnx import AttributeProto, TensorProto, TensorShapeProto, ValueInfoProto, helper, numpy_helper

__all__ = ["is_unsaid", "spelled_array", "spelled_attribute", "spelled_shape", "spelled_type"]

FEW: Final = 8
"""Elements up to which a tensor is written out."""


def spelled_type(info: ValueInfoProto) -> str:
    """`float[N,4]`, as in ONNX's text; `?` is a dim of which nothing is said."""
    kind, tensor = info.type.WhichOneof("value") or "no type", info.type.tensor_type
    if kind != "tensor_type":
        return kind.removesuffix("_type")
    dtype = TensorProto.DataType.Name(tensor.elem_type).lower()
    if not tensor.HasField("shape"):
        return f"{dtype}[]"
    dims = ["?" if is_unsaid(dim) else str(dim.dim_param or dim.dim_value) for dim in tensor.shape.dim]
    return f"{dtype}[{','.join(dims)}]" if dims else dtype


def is_unsaid(dim: TensorShapeProto.Dimension) -> bool:
    return not dim.HasField("dim_value") and not dim.dim_param


def spelled_shape(tensor: TensorProto) -> str:
    """`float[768,768]`: the type of a stored tensor."""
    dtype = TensorProto.DataType.Name(tensor.data_type).lower()
    return f"{dtype}[{','.join(map(str, tensor.dims))}]" if tensor.dims else dtype


def spelled_array(array: np.ndarray) -> str:
    """Its elements, or how many there are."""
    if array.size > FEW:
        return f"({array.size} elements)"
    return str(array.tolist())


def spelled_attribute(attribute: AttributeProto) -> str:
    """The value: `[1, 0]`, `'NOTSET'`, `1e-05`, a type, or `(a graph)`."""
    if attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
        return "(a graph)"
    if attribute.type == AttributeProto.TENSOR:
        return f"{spelled_shape(attribute.t)} {_spelled_tensor(attribute.t)}"
    if attribute.type == AttributeProto.FLOAT:
        return f"{np.float32(attribute.f)}"
    if attribute.type == AttributeProto.FLOATS:
        return f"[{', '.join(str(np.float32(one)) for one in attribute.floats)}]"
    value = helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return repr(value.decode(errors="replace"))
    if isinstance(value, (list, tuple)) or hasattr(value, "__iter__"):
        return str([one.decode(errors="replace") if isinstance(one, bytes) else one for one in value])
    return str(value)


def _spelled_tensor(tensor: TensorProto) -> str:
    try:
        return spelled_array(numpy_helper.to_array(tensor))
    except (TypeError, ValueError):
        return "(not readable)"
