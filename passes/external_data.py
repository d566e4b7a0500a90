"""External data: memory-mapped, and only from the model's own folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from onnx import TensorProto

from passes.errors import ModelMistake
from passes.payload import byte_count

__all__ = ["external_bytes"]


def external_bytes(tensor: TensorProto, base_dir: Path | None) -> np.ndarray:
    """The bytes of an external tensor as a uint8 view of its file.

    Raises:
        ModelMistake: the file is missing, ends too early, or lies outside `base_dir`; or offset and length are no
            numbers that fit.
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
    needed = byte_count(tensor)
    offset, length = _number(tensor, entries, "offset"), _number(tensor, entries, "length") or needed
    if length != needed:
        raise ModelMistake(
            f"initializer {tensor.name!r} has {length} bytes of external data, but with the shape {list(tensor.dims)} "
            f"it takes {needed}"
        )
    if offset + length > path.stat().st_size:
        raise ModelMistake(
            f"external data file {path} ends before initializer {tensor.name!r} does "
            f"({path.stat().st_size} bytes, needs {offset + length}); is the file complete?"
        )
    if length == 0:
        return np.empty(0, dtype=np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="r", offset=offset, shape=(length,))


def _number(tensor: TensorProto, entries: Mapping[str, str], key: str) -> int:
    text = entries.get(key) or "0"
    if not (text.isascii() and text.isdigit()):
        raise ModelMistake(
            f"initializer {tensor.name!r} has {key} {text!r} in its external data, expected a whole number of 0 or more"
        )
    return int(text)
