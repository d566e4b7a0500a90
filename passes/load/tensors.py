"""Checks of a tensor, dense or sparse: its name, dtype and dims, and data of exactly that size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import SparseTensorProto, TensorProto, helper

from passes.errors import ModelError
from passes.load.values import DTYPES, MOST_DIMS, MOST_ELEMENTS, check_bytes, check_entries, check_text, element_count

PACKED_BITS: Final[Mapping[str, int]] = {"UINT4": 4, "INT4": 4, "FLOAT4E2M1": 4, "UINT2": 2, "INT2": 2}
"""Dtypes of which several elements share a byte."""

UNCHECKED: Final = frozenset({"FLOAT6E2M3", "FLOAT6E3M2"})
"""Dtypes whose layout no release of onnx has settled yet."""

FIELDS: Final = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")


def byte_count(tensor: TensorProto) -> int:
    """Bytes of `tensor` as ONNX `raw_data`, by its dims and dtype.

    Raises:
        ModelError: a dim is negative, or the dtype is unknown.
    """
    return -(-_elements(tensor) * item_bits(dtype_of(tensor)) // 8)


def check_payload(tensor: TensorProto, *, may_be_empty: bool = False) -> None:
    """Refuse a tensor whose inline data does not fill its shape, or that has data in two fields, or a field and a file.

    External data is checked where it is mapped.

    Args:
        tensor: a tensor with inline data.
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
    raw_bytes = len(tensor.raw_data) if tensor.HasField("raw_data") else 0  # protobuf returns a copy each time
    if raw_bytes or (not held and tensor.HasField("raw_data")):
        held.append("raw_data")
    if tensor.data_location == TensorProto.EXTERNAL:
        if held:
            raise ModelError(f"tensor {tensor.name!r} has its data in a file, and in {held[0]} too; expected one place")
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
    """Entries of the typed field: a complex number takes two entries, and packed types are counted in bytes."""
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


FoundFiles = dict[str, tuple[Path, int | None]]
"""Location → the file, and its size in bytes; None where it is missing. A model may have 70,000 tensors in 60 files."""


def check_tensor(
    tensor: TensorProto, folder: Path | None, *, may_be_empty: bool, files: FoundFiles | None = None
) -> None:
    """
    Args:
        tensor: a stored tensor.
        folder: of its external data; None if it is not known, and then the file is not checked.
        may_be_empty: a tensor without data, or whose file is missing, is a weight that was left out.
        files: known from other tensors; added to.

    Raises:
        ModelError: naming the tensor, what was found and what was expected.
    """
    check_text(tensor.name, "the name of a tensor")
    check_entries(tensor.external_data, f"the external data of tensor {tensor.name!r}")
    check_payload(tensor, may_be_empty=may_be_empty)
    if tensor.data_location != TensorProto.EXTERNAL:
        return
    entry = entry_of(tensor)
    if folder is None:
        return
    files = {} if files is None else files
    if entry.location not in files:
        path = file_in(folder, tensor, entry.location)
        try:
            files[entry.location] = path, path.stat().st_size if path.is_file() else None
        except OSError as error:
            raise ModelError(f"initializer {tensor.name!r} points to {entry.location!r} ({error.strerror})") from error
    path, size = files[entry.location]
    if size is not None or not may_be_empty:
        check_in_file(tensor, entry, path, size)


def check_in_file(tensor: TensorProto, entry: ExternalEntry, path: Path, size: int | None) -> None:
    """Refuse a file that is missing (`size` is None), or that ends before the tensor does."""
    if size is None:
        raise ModelError(f"external data file {path} of initializer {tensor.name!r} is missing")
    if entry.offset + entry.nbytes > size:
        raise ModelError(
            f"external data file {path} ends before initializer {tensor.name!r} does "
            f"({size} bytes, needs {entry.offset + entry.nbytes}); is the file complete?"
        )


def check_sparse(sparse: SparseTensorProto) -> None:
    """
    Raises:
        ModelError: values and indices that do not fit each other or the shape; or a shape that no memory holds, since
            runtimes make it dense.
    """
    name, dims = sparse.values.name, list(sparse.dims)
    where = f"sparse tensor {name!r}"
    for part in (sparse.values, sparse.indices):
        check_tensor(part, None, may_be_empty=False)
        if part.data_location == TensorProto.EXTERNAL:
            raise ModelError(f"{where} has external data; expected it inside of the model")
    dtype = dtype_of(sparse.values)
    if not dims or any(dim <= 0 for dim in dims) or len(dims) > MOST_DIMS or element_count(dims) > MOST_ELEMENTS:
        raise ModelError(f"{where} has the shape {dims}; expected dims of 1 and more that a machine can hold")
    check_bytes(where, dims, -(-item_bits(dtype) // 8))
    count = list(sparse.values.dims)
    shape = list(sparse.indices.dims)
    if len(count) != 1 or shape not in (count, [*count, len(dims)]) or sparse.indices.data_type != TensorProto.INT64:
        raise ModelError(
            f"{where} has values of the shape {count} and indices of {shape}; expected [n], and int64[n] or "
            f"int64[n, {len(dims)}]"
        )
    indices = onnx.numpy_helper.to_array(sparse.indices)
    limit = element_count(dims) if indices.ndim == 1 else dims
    if indices.size and ((indices < 0).any() or (indices >= limit).any()):
        raise ModelError(f"{where} has an index outside of its shape {dims}")


MOST_PATH: Final = 4096
"""Characters of a location: no file system takes longer ones."""


@dataclass(frozen=True, slots=True)
class ExternalEntry:
    """The position of a tensor's bytes in a file, relative to the model's folder."""

    location: str
    offset: int
    nbytes: int


def entry_of(tensor: TensorProto) -> ExternalEntry:
    """
    Raises:
        ModelError: there is no location, offset or length is no number, or the length is not that of the shape.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location, needed = entries.get("location", ""), byte_count(tensor)
    if dtype_of(tensor) == "STRING":
        raise ModelError(f"initializer {tensor.name!r} is of strings, which ONNX does not put into files of their own")
    if not location or "\0" in location or len(location) > MOST_PATH:
        raise ModelError(
            f"initializer {tensor.name!r} is external data at {location[:80]!r}, which names no file; "
            "expected a path relative to the model's folder"
        )
    offset = _number(tensor, entries, "offset")
    length = _number(tensor, entries, "length") or needed
    if length != needed:
        raise ModelError(
            f"initializer {tensor.name!r} has {length} bytes of external data, but with the shape "
            f"{list(tensor.dims)} it takes {needed}"
        )
    return ExternalEntry(location, offset, needed)


def file_in(folder: Path, tensor: TensorProto, location: str) -> Path:
    """The file, which may be missing; `folder` is resolved.

    Raises:
        ModelError: it lies outside of `folder`, or has further names that may.
    """
    try:
        path = (folder / location).resolve()
    except (OSError, RuntimeError) as error:  # a circle of links
        raise ModelError(
            f"initializer {tensor.name!r} points to {location!r}, which cannot be followed ({error})"
        ) from error
    if not path.is_relative_to(folder) or path == folder:
        raise ModelError(
            f"initializer {tensor.name!r} points to {location!r}, outside of the model's folder; "
            "external data has to lie next to the model"
        )
    if path.is_file() and (names := path.stat().st_nlink) > 1:
        raise ModelError(
            f"initializer {tensor.name!r} points to {location!r}, a file with {names} names (hard links); "
            "another one may lie outside of the model's folder, so ONNX refuses it too; put a copy in its place"
        )
    return path


def _number(tensor: TensorProto, entries: Mapping[str, str], key: str) -> int:
    text = entries.get(key) or "0"
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise ModelError(
            f"initializer {tensor.name!r} has {key} {text[:80]!r} in its external data, "
            "expected an integer of 0 or more"
        )
    return int(text)
