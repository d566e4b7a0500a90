"""External data: memory-mapped, and only from the model's own folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from onnx import TensorProto

from passes.errors import ModelMistake
from passes.model.mapped import FileMaps, Place
from passes.model.payload import byte_count

__all__ = ["ExternalFiles"]


class ExternalFiles:
    """The data files beside one model.

    Args:
        base_dir: the model's folder; None if it is not known.
    """

    def __init__(self, base_dir: Path | None) -> None:
        self._root = None if base_dir is None else base_dir.resolve()
        self._found: dict[str, tuple[Path, int]] = {}
        self._maps = FileMaps()

    def bytes_of(self, tensor: TensorProto) -> np.ndarray:
        """The bytes of an external tensor as a uint8 view of its file, of which nothing is read.

        Raises:
            ModelMistake: the file is missing, ends too early, or lies outside of the folder; or offset and length are
                no numbers that fit.
        """
        entries = {entry.key: entry.value for entry in tensor.external_data}
        path, size = self._file(tensor, entries.get("location", ""))
        needed = byte_count(tensor)
        offset, length = _number(tensor, entries, "offset"), _number(tensor, entries, "length") or needed
        if length != needed:
            raise ModelMistake(
                f"initializer {tensor.name!r} has {length} bytes of external data, but with the shape "
                f"{list(tensor.dims)} it takes {needed}"
            )
        if offset + length > size:
            raise ModelMistake(
                f"external data file {path} ends before initializer {tensor.name!r} does "
                f"({size} bytes, needs {offset + length}); is the file complete?"
            )
        try:
            return self._maps.view(Place(str(path), offset, length))
        except (OSError, ValueError) as error:
            raise ModelMistake(
                f"external data file {path} of initializer {tensor.name!r} cannot be mapped "
                f"({getattr(error, 'strerror', None) or error}); each file takes a descriptor, so the limit of open "
                "files (ulimit -n) has to be above their number"
            ) from error

    def _file(self, tensor: TensorProto, location: str) -> tuple[Path, int]:
        """The file, with its size in bytes."""
        if location in self._found:
            return self._found[location]
        if self._root is None:
            raise ModelMistake(f"initializer {tensor.name!r} is external data, but the model's folder is not known")
        path = (self._root / location).resolve()
        if not path.is_relative_to(self._root) or path == self._root:
            raise ModelMistake(
                f"initializer {tensor.name!r} points to {location!r}, outside of the model's folder; "
                "external data has to lie beside the model"
            )
        if not path.is_file():
            raise ModelMistake(f"external data file {path} of initializer {tensor.name!r} is missing")
        self._found[location] = (path, path.stat().st_size)
        return self._found[location]


def _number(tensor: TensorProto, entries: Mapping[str, str], key: str) -> int:
    text = entries.get(key) or "0"
    if not (text.isascii() and text.isdigit()):
        raise ModelMistake(
            f"initializer {tensor.name!r} has {key} {text!r} in its external data, expected a whole number of 0 or more"
        )
    return int(text)
