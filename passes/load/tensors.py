"""One tensor, dense or sparse: its name, dtype and dims, and data of just that size."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import SparseTensorProto, TensorProto

from passes.errors import ModelError
from passes.load.budget import MOST_ELEMENTS, check_bytes, element_count
from passes.load.external import entry_of, file_in
from passes.load.payload import MOST_DIMS, check_payload, dtype_of, item_bits
from passes.load.values import check_entries, check_text

__all__ = ["check_sparse", "check_tensor"]


def check_tensor(tensor: TensorProto, folder: Path | None, *, may_be_empty: bool) -> None:
    """
    Args:
        folder: of its external data; None where that is not known, and nothing is said of the file.
        may_be_empty: a tensor without data, or whose file is missing, is a weight that was left out.

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
    path = file_in(folder, tensor, entry.location)
    try:
        size = path.stat().st_size if path.is_file() else None
    except OSError as error:
        raise ModelError(f"initializer {tensor.name!r} points to {entry.location!r} ({error.strerror})") from error
    if size is None:
        if not may_be_empty:
            raise ModelError(f"external data file {path} of initializer {tensor.name!r} is missing")
    elif entry.offset + entry.nbytes > size:
        raise ModelError(
            f"external data file {path} ends before initializer {tensor.name!r} does "
            f"({size} bytes, needs {entry.offset + entry.nbytes}); is the file complete?"
        )


def check_sparse(sparse: SparseTensorProto) -> None:
    """
    Raises:
        ModelError: values and indices that do not fit each other or the shape; or a shape that no memory holds, since
            whoever runs the model makes it dense.
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
    places = list(sparse.indices.dims)
    if len(count) != 1 or places not in (count, [*count, len(dims)]) or sparse.indices.data_type != TensorProto.INT64:
        raise ModelError(
            f"{where} has values of the shape {count} and indices of {places}; expected [n], and int64[n] or "
            f"int64[n, {len(dims)}]"
        )
    indices = onnx.numpy_helper.to_array(sparse.indices)
    limit = element_count(dims) if indices.ndim == 1 else dims
    if indices.size and ((indices < 0).any() or (indices >= limit).any()):
        raise ModelError(f"{where} has an index outside of its shape {dims}")
