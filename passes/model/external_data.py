"""External data: memory-mapped, and only from the model's own folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto

from passes.errors import ModelError
from passes.load.external import entry_of, file_in
from passes.model.mapped import FileMaps, Place

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
            ModelError: the file is missing, ends too early, or lies outside of the folder; or offset and length are
                no numbers that fit.
        """
        entry = entry_of(tensor)
        path, size = self._file(tensor, entry.location)
        if entry.offset + entry.nbytes > size:
            raise ModelError(
                f"external data file {path} ends before initializer {tensor.name!r} does "
                f"({size} bytes, needs {entry.offset + entry.nbytes}); is the file complete?"
            )
        try:
            return self._maps.view(Place(str(path), entry.offset, entry.nbytes))
        except (OSError, ValueError) as error:
            raise ModelError(
                f"external data file {path} of initializer {tensor.name!r} cannot be mapped "
                f"({getattr(error, 'strerror', None) or error}); each file takes a descriptor, so the limit of open "
                "files (ulimit -n) has to be above their number"
            ) from error

    def _file(self, tensor: TensorProto, location: str) -> tuple[Path, int]:
        """The file, with its size in bytes."""
        if location in self._found:
            return self._found[location]
        if self._root is None:
            raise ModelError(f"initializer {tensor.name!r} is external data, but the model's folder is not known")
        path = file_in(self._root, tensor, location)
        if not path.is_file():
            raise ModelError(f"external data file {path} of initializer {tensor.name!r} is missing")
        self._found[location] = (path, path.stat().st_size)
        return self._found[location]
