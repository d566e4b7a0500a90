"""External data: memory-mapped, and only from the model's own folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from passes.errors import ModelMistake

__all__ = ["external_bytes"]


def external_bytes(tensor: TensorProto, base_dir: Path | None) -> np.ndarray:
    """The bytes of an external tensor as a uint8 view of its file.

    Raises:
        ModelMistake: the file is missing, ends too early, or lies outside `base_dir`.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    if base_dir is None:
        raise ModelMistake(f"initializer {tensor.name!r} is external data, but the model's folder is not known")
    root = base_dir.resolve()
    path = (root / entries.get("location", "")).resolve()
    if not path.is_relative_to(root) or path == root:
        raise ModelMistake(
            f"initializer {tensor.name!r} points to {entries.get('location')!r}, outside of the model's folder; "
            "external data has to lie beside the model"
        )
    if not path.is_file():
        raise ModelMistake(f"external data file {path} of initializer {tensor.name!r} is missing")
    itemsize = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type)).itemsize
    length = int(entries.get("length", 0)) or int(np.prod(tensor.dims, dtype=np.int64)) * itemsize
    offset = int(entries.get("offset", 0))
    if offset + length > path.stat().st_size:
        raise ModelMistake(
            f"external data file {path} ends before initializer {tensor.name!r} does "
            f"({path.stat().st_size} bytes, needs {offset + length}); is the file complete?"
        )
    if length == 0:
        return np.empty(0, dtype=np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="r", offset=offset, shape=(length,))
