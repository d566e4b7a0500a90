"""Arrays of every dtype as onnxruntime's values, and back. onnxruntime takes and gives the dtypes that numpy does not
have, such as bfloat16 and int4, as values of its own alone; those of fewer than 8 bits lie packed in its memory.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from passes.load.tensors import PACKED_BITS

BYTES: Final = frozenset(
    {
        TensorProto.BFLOAT16,
        TensorProto.FLOAT8E4M3FN,
        TensorProto.FLOAT8E4M3FNUZ,
        TensorProto.FLOAT8E5M2,
        TensorProto.FLOAT8E5M2FNUZ,
    }
)
"""Dtypes that numpy does not have, of whole bytes."""

PACKED: Final = frozenset(map(TensorProto.DataType.Value, PACKED_BITS))
"""Dtypes of fewer than 8 bits, of which several elements share a byte."""

WORDS: Final = ("bfloat16", "float8", "float4", "int4", "int2")
"""Parts of the names of these dtypes in onnxruntime."""


def is_beyond_numpy(entry: onnxruntime.NodeArg) -> bool:
    """Whether an input or output of a session has a dtype that numpy does not have."""
    return any(word in entry.type for word in WORDS)


def value_of(array: np.ndarray) -> onnxruntime.OrtValue:
    """An array as onnxruntime's value, over the same memory unless it has to be packed."""
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    if kind in PACKED:
        packed = numpy_helper.from_array(array).raw_data
        value = onnxruntime.OrtValue.ortvalue_from_shape_and_type([*array.shape], kind)
        ctypes.memmove(value.data_ptr(), packed, len(packed))
        return value
    if kind in BYTES:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(np.asarray(array, order="C"), kind)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def array_of(value: onnxruntime.OrtValue) -> np.ndarray:
    """onnxruntime's value as an array, of its own memory where numpy does not have the dtype."""
    kind, shape = value.element_type(), value.shape()
    if kind not in BYTES | PACKED:
        return value.numpy()
    memory = (ctypes.c_uint8 * value.tensor_size_in_bytes()).from_address(value.data_ptr())
    if not math.prod(shape):
        return np.empty(shape, helper.tensor_dtype_to_np_dtype(kind))
    return numpy_helper.to_array(helper.make_tensor("value", kind, shape, bytes(memory), raw=True))


def run_session(
    session: onnxruntime.InferenceSession,
    outputs: Sequence[str],
    feeds: Mapping[str, np.ndarray],
    options: onnxruntime.RunOptions | None = None,
) -> Sequence[Any]:
    """The outputs; where an input or output has a dtype that numpy does not have, through values of onnxruntime."""
    if not any(map(is_beyond_numpy, (*session.get_inputs(), *session.get_outputs()))):
        return session.run(None, dict(feeds), options)
    values = {name: value_of(array) for name, array in feeds.items()}
    return [*map(array_of, session.run_with_ort_values(outputs, values, options))]
