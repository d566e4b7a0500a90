"""`Weight`, a tensor's bytes with their digest; and its stand-in: a few elements in its place, made from the digest.

Optimizers compare and hash tensors by these elements. So two stand-ins are equal exactly when their tensors are equal,
and the stand-in of a tensor of only 0 or only 1 is all 0 or all 1. The elements of other stand-ins are never 0 or 1,
nor NaN in any format, since a NaN would make a tensor unequal to itself.

The digest of an **unread** weight is computed from its file, offset and length. Equal ranges are equal tensors; but two
copies of one tensor count as different, and a tensor of only 0 or 1 is not recognized. So a model of terabytes is
detached without reading any of its elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from passes.errors import ModelError

DETACH_FROM_BYTES: Final = 1024
"""Smaller tensors stay in the model."""

MOST_ELEMENTS: Final = 32
"""Elements of a stand-in: one for each hex digit of a digest."""

BLOCK: Final = 64
"""Rows or columns of a transposed matrix that are copied together."""

Array = np.ndarray[Any, np.dtype[Any]]

Key = tuple[tuple[int, ...], int, tuple[float, ...]]
"""Shape, ONNX dtype and elements of a stand-in: they identify a detached tensor that a pass has moved or renamed."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A view of one tensor's bytes as in ONNX `raw_data`: row-major, little-endian.

    dims: the tensor's shape.
    data_type: its dtype, of `TensorProto.DataType`.
    data: its bytes, uint8; an array that is not contiguous stands for several unread tensors in one.
    digest: 32 hex digits that equal tensors share.
    """

    dims: tuple[int, ...]
    data_type: int
    data: np.ndarray
    digest: str
    unread: bool = False
    """Whether the digest is computed from the file range instead of the content."""
    digests_by_order: dict[tuple[int, ...], str] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Order of axes → the digest of the transposed tensor, where it was asked for."""

    @classmethod
    def of(cls, array: np.ndarray) -> Weight:
        """A numeric array as a weight; a row-major array is not copied."""
        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        return cls(array.shape, helper.np_dtype_to_tensor_dtype(array.dtype), data, digest_of(array))

    def array(self) -> np.ndarray:
        """The tensor as numpy, without copying (bfloat16 as `ml_dtypes.bfloat16`)."""
        return self.data.view(helper.tensor_dtype_to_np_dtype(self.data_type)).reshape(self.dims)


def key_of(tensor: TensorProto) -> Key | None:
    """The key of `tensor` if it is a stand-in.

    Returns:
        None for a dtype that is never detached, and for more elements than a stand-in has.
    """
    field = TYPED_FIELDS.get(tensor.data_type)
    elements = () if field is None else getattr(tensor, field)
    if field is None or len(elements) > MOST_ELEMENTS:
        return None
    return tuple(tensor.dims), tensor.data_type, tuple(elements)


def stand_in_elements(weight: Weight) -> tuple[float, ...] | None:
    """The elements of a tensor's stand-in; an unread weight is not read for them.

    Returns:
        None if the tensor has to stay: it is small, or its zeros are partly negative.
    """
    if weight.unread:
        return _elements_from_digest(weight.digest)
    if weight.data.nbytes < DETACH_FROM_BYTES:
        return None
    array = weight.array()
    for unit in (0, 1):
        if array.flat[0] == unit and (array == unit).all():
            # A pass takes -0.0 for 0.0, but their bytes differ: a tensor with -0.0 has no stand-in of zeros.
            uniform = not weight.data.reshape(array.size, -1).view(np.uint8).any() if unit == 0 else True
            return _elements_of_unit(weight, unit) if uniform else None
    return _elements_from_digest(weight.digest)


def initializer_of(name: str, weight: Weight) -> tuple[TensorProto, Key | None]:
    """A stand-in for `weight`, with its key; or an initializer that holds the data, and None, if it has no stand-in."""
    tensor = TensorProto(name=name, data_type=weight.data_type, dims=weight.dims)
    elements = stand_in_elements(weight) if weight.data_type in TYPED_FIELDS else None
    if elements is None:
        inline(tensor, weight.data)
        return tensor, None
    getattr(tensor, TYPED_FIELDS[weight.data_type]).extend(elements)
    return tensor, (weight.dims, weight.data_type, elements)


def stored_array(array: np.ndarray, name: str) -> tuple[TensorProto, dict[Key, Weight]]:
    """An initializer with the elements of an array: of a large one a stand-in, with its weight by the key."""
    if helper.np_dtype_to_tensor_dtype(array.dtype) not in TYPED_FIELDS:
        return numpy_helper.from_array(array, name), {}
    weight = Weight.of(array)
    tensor, key = initializer_of(name, weight)
    return tensor, {} if key is None else {key: weight}


def clear_data(tensor: TensorProto) -> None:
    """Remove all data of `tensor`, inline or external."""
    for name in ("raw_data", "external_data", "data_location", *dict.fromkeys(TYPED_FIELDS.values())):
        tensor.ClearField(name)


def point_to(tensor: TensorProto, location: str, offset: int, length: int) -> None:
    """Make `tensor` external data at this location."""
    clear_data(tensor)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))


def inline(tensor: TensorProto, data: np.ndarray) -> None:
    """Store `data` in `tensor`.

    Raises:
        ModelError: `data` stands for several unread tensors (`passes.weights.weight_stacks`), and has no bytes.
    """
    if not data.flags.c_contiguous:
        raise ModelError(f"{tensor.name!r} is joined from several unread weights; its elements cannot be stored here")
    clear_data(tensor)
    tensor.raw_data = data.tobytes()


def _elements_from_digest(digest: str) -> tuple[float, ...]:
    """2 to 17 for each hex digit: no format reads these as NaN, 0 or 1, neither as values nor as bits."""
    return tuple(2 + int(digit, 16) for digit in digest)


def _elements_of_unit(weight: Weight, unit: int) -> tuple[float, ...]:
    """0 or 1 as the dtype's typed field stores it; for float16, bfloat16 and float8 the field holds bit patterns."""
    if unit == 1 and weight.data_type in SMALL_FLOATS:
        return (int.from_bytes(weight.data[: weight.array().itemsize].tobytes(), "little"),)
    return (unit,)


def digest_of(array: np.ndarray) -> str:
    """128 bits of a tensor's row-major bytes, in hex; for strings, of their lengths and UTF-8 bytes."""
    if array.dtype.kind in "OUS":
        items = array.ravel().tolist()
        return digest_of_texts(item if isinstance(item, bytes) else str(item).encode() for item in items)
    if array.ndim != 2 or array.flags.c_contiguous:
        return digest_of_bytes(np.ascontiguousarray(array).view(np.uint8).data)
    hasher = _new_hasher()
    for begin in range(0, len(array), BLOCK):  # a transposed matrix of gigabytes is never copied as a whole
        hasher.update(np.ascontiguousarray(array[begin : begin + BLOCK]).view(np.uint8).data)
    return str(hasher.hexdigest(length=16))


def to_contiguous(array: np.ndarray) -> np.ndarray:
    """`np.ascontiguousarray`; a transposed matrix takes a quarter of the time, since it is copied by blocks."""
    if array.ndim != 2 or array.flags.c_contiguous or not array.flags.f_contiguous:
        return np.ascontiguousarray(array)
    copy = np.empty(array.shape, array.dtype)
    for begin in range(0, array.shape[1], BLOCK):
        copy[:, begin : begin + BLOCK] = array[:, begin : begin + BLOCK]
    return copy


def derived_digest(source: str, how: str, elements: Iterable[int]) -> str:
    """The digest of an unread tensor that is made from another: 128 bits in hex, unequal to all digests of content.

    Args:
        source: the digest of the unread tensor.
        how: names the operation.
        elements: integers that determine the operation, such as a permutation.
    """
    return digest_of_bytes(repr(("unread", source, how, tuple(elements))).encode())


def digest_of_texts(texts: Iterable[bytes]) -> str:
    """128 bits, in hex, of texts in UTF-8 and their lengths."""
    return digest_of_bytes(b"".join(len(text).to_bytes(8, "little") + text for text in texts))


def digest_of_bytes(data: bytes | memoryview) -> str:
    """128 bits of BLAKE3: twice as fast as SHA-256 where processors compute that, and weights are gigabytes."""
    hasher = _new_hasher()
    hasher.update(data)
    return str(hasher.hexdigest(length=16))


def _new_hasher() -> Any:
    """Imported when a digest is made: plans run where BLAKE3 is not installed, and make none."""
    from blake3 import blake3

    return blake3()


TYPED_FIELDS: Final[Mapping[int, str]] = {
    dtype: helper.tensor_dtype_to_field(dtype)
    for dtype in (
        *(TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16),
        *(TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2, TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16),
        *(TensorProto.UINT16, TensorProto.INT32, TensorProto.INT64, TensorProto.UINT32, TensorProto.UINT64),
    )
}
"""Dtype that can be detached → the field of TensorProto for the stand-in's elements. bool is not among them: its
elements are 0 and 1 alone."""


SMALL_FLOATS: Final = frozenset(
    {TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2}
)
