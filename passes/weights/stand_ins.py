"""Digests of tensors, and stand-ins: a few elements in place of a tensor, made from its digest.

Optimizers compare and hash tensors by these elements, so two stand-ins are equal exactly when their tensors are equal,
and the stand-in of a tensor of only 0 or only 1 is all 0 or all 1. The elements of other stand-ins are never 0 or 1,
nor NaN in any format, since a NaN would make a tensor unequal to itself.

**Unread** weights are identified by their file range instead: their digest is computed from file, offset and length.
Equal ranges are equal tensors; but two copies of one tensor count as different, and a tensor of only 0 or 1 is not
recognized. So a model of terabytes is detached without reading any of its elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from blake3 import blake3
from onnx import TensorProto, helper

from passes.errors import ModelError

DETACH_FROM_BYTES: Final = 1024

MOST_ELEMENTS: Final = 32
"""Elements of a stand-in: one for each hex digit of a digest."""

BLOCK: Final = 64
"""Columns that are copied together."""

Key = tuple[tuple[int, ...], int, tuple[float, ...]]
"""Shape, ONNX dtype and elements of a stand-in: they identify a detached tensor that a pass has moved or renamed."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A view of one tensor's bytes as in ONNX `raw_data`: row-major, little-endian."""

    dims: tuple[int, ...]
    data_type: int
    data: np.ndarray
    digest: str
    unread: bool = False
    """Whether its digest is computed from its file range, and not from its content."""
    digests_by_order: dict[tuple[int, ...], str] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Order of axes → the digest of the transposed tensor, where it was asked for."""

    @classmethod
    def of(cls, array: np.ndarray) -> Weight:
        """An array of numbers in memory as a weight; elements that lie in their order are not copied."""
        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        return cls(array.shape, helper.np_dtype_to_tensor_dtype(array.dtype), data, digest_of(array))

    def array(self) -> np.ndarray:
        """The tensor as numpy, without copying (bfloat16 as `ml_dtypes.bfloat16`)."""
        return self.data.view(helper.tensor_dtype_to_np_dtype(self.data_type)).reshape(self.dims)


def key_of(tensor: TensorProto) -> Key | None:
    """What identifies `tensor` if it is a stand-in; None for a dtype that is never detached, and for more elements than
    stand-ins have."""
    field = TYPED_FIELDS.get(tensor.data_type)
    elements = () if field is None else getattr(tensor, field)
    if field is None or len(elements) > MOST_ELEMENTS:
        return None
    return tuple(tensor.dims), tensor.data_type, tuple(elements)


def stand_in_elements(weight: Weight) -> tuple[float, ...] | None:
    """The elements of a tensor's stand-in; None if no elements identify it, so that it has to stay.

    An unread weight is not read.
    """
    if weight.unread:
        return _elements_from_digest(weight.digest)
    if weight.data.nbytes < DETACH_FROM_BYTES:
        return None
    array = weight.array()
    for unit in (0, 1):
        if array.flat[0] == unit and (array == unit).all():
            # -0.0 among zeros: equal to a pass, not equal as bytes, so it may not share a stand-in with plain zeros.
            uniform = not weight.data.reshape(array.size, -1).view(np.uint8).any() if unit == 0 else True
            return _unit_number(weight, unit) if uniform else None
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
    """Give `tensor` its bytes back.

    Raises:
        ModelError: it is a stack of several tensors (`passes.weights.weight_stacks`), without bytes of its own.
    """
    if not data.flags.c_contiguous:
        raise ModelError(f"{tensor.name!r} is joined from weights that are to stay unread")
    clear_data(tensor)
    tensor.raw_data = data.tobytes()


def _elements_from_digest(digest: str) -> tuple[float, ...]:
    """Numbers that no format reads as NaN, 0 or 1, as values or as bits."""
    return tuple(2 + int(digit, 16) for digit in digest)


def _unit_number(weight: Weight, unit: int) -> tuple[float, ...]:
    """0 or 1 as the dtype's typed field stores it: small floats keep bit patterns there."""
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
    hasher = blake3()
    for begin in range(0, len(array), BLOCK):  # a transposed matrix of gigabytes is never copied as a whole
        hasher.update(np.ascontiguousarray(array[begin : begin + BLOCK]).view(np.uint8).data)
    return hasher.hexdigest(length=16)


def to_contiguous(array: np.ndarray) -> np.ndarray:
    """`np.ascontiguousarray`, in a quarter of its time for a transposed matrix: blocks of it fit into a cache."""
    if array.ndim != 2 or array.flags.c_contiguous or not array.flags.f_contiguous:
        return np.ascontiguousarray(array)
    copy = np.empty(array.shape, array.dtype)
    for begin in range(0, array.shape[1], BLOCK):
        copy[:, begin : begin + BLOCK] = array[:, begin : begin + BLOCK]
    return copy


def derived_digest(source: str, how: str, elements: Iterable[int]) -> str:
    """128 bits, in hex, of a tensor identified by its origin; no digest of content is equal."""
    return digest_of_bytes(repr(("unread", source, how, tuple(elements))).encode())


def digest_of_texts(texts: Iterable[bytes]) -> str:
    """128 bits, in hex, of texts in UTF-8 and their lengths."""
    return digest_of_bytes(b"".join(len(text).to_bytes(8, "little") + text for text in texts))


def digest_of_bytes(data: bytes | memoryview) -> str:
    """128 bits of BLAKE3: twice as fast as SHA-256 where processors compute that, and weights are gigabytes."""
    return blake3(data).hexdigest(length=16)


TYPED_FIELDS: Final[Mapping[int, str]] = {
    dtype: helper.tensor_dtype_to_field(dtype)
    for dtype in (
        *(TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16),
        *(TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2, TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16),
        *(TensorProto.UINT16, TensorProto.INT32, TensorProto.INT64, TensorProto.UINT32, TensorProto.UINT64),
    )
}
"""The dtypes that can be detached, with the field of TensorProto that their stand-in's elements go to. A bool stand-in
could only say "all true"."""


SMALL_FLOATS: Final = frozenset(
    {TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2}
)
