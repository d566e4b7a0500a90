"""Files mapped into memory, once each however many tensors lie in them: a mapping holds a file descriptor.

To map a file reads nothing of it, and takes no memory: what is looked at later comes from the file then.
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass
from io import FileIO
from mmap import ALLOCATIONGRANULARITY, PAGESIZE
from pathlib import Path

import numpy as np
from onnx import TensorProto

from passes.errors import ModelError
from passes.load.tensors import check_in_file, entry_of, file_in

__all__ = ["ExternalFiles", "FileMaps", "FileRange", "find_file_range", "release"]


@dataclass(frozen=True, slots=True)
class FileRange:
    """Where bytes lie: `nbytes` of them, from `offset` on, in the file `path`."""

    path: str
    offset: int
    nbytes: int


class FileMaps:
    """Views of files. Each file is mapped when it is first asked for, and again when it has grown since."""

    def __init__(self) -> None:
        self._maps: dict[str, np.memmap] = {}

    def view(self, place: FileRange) -> np.ndarray:
        """The bytes at `place` as uint8, read-only.

        Raises:
            OSError: the file cannot be opened or mapped.
            ValueError: it ends before `place` does.
        """
        if place.nbytes == 0:
            return np.empty(0, np.uint8)
        whole, end = self._maps.get(place.path), place.offset + place.nbytes
        if whole is None or whole.size < end:
            with FileIO(place.path) as file:
                whole = self._maps[place.path] = np.memmap(file, np.uint8, "r")
        if whole.size < end:
            raise ValueError(f"{place.path} has {whole.size} bytes, and {end} were asked for")
        return whole[place.offset : end]


def find_file_range(data: np.ndarray) -> FileRange | None:
    """Where `data` lies, if it is a view of a mapped file that is still there."""
    if not isinstance(data, np.memmap) or data.filename is None or data._mmap is None:  # type: ignore[attr-defined]
        return None
    if not Path(data.filename).exists():
        return None
    # numpy tells the offset of the mapping that was asked for; a view of it may begin later.
    mapped_from = data.offset - data.offset % ALLOCATIONGRANULARITY
    return FileRange(str(data.filename), mapped_from + _distance(data), data.nbytes)


def release(data: np.ndarray) -> None:
    """Give the memory of mapped data back; it comes from its file again when it is next read."""
    if isinstance(data, np.memmap) and data.nbytes:
        with contextlib.suppress(AttributeError, ValueError, OSError):
            begin, end = _distance(data), _distance(data) + data.nbytes
            begin -= begin % PAGESIZE
            data._mmap.madvise(mmap.MADV_DONTNEED, begin, end - begin)  # type: ignore[attr-defined]


def _distance(data: np.memmap) -> int:
    """Bytes from the beginning of its mapping."""
    mapping = np.frombuffer(data._mmap, np.uint8)  # type: ignore[attr-defined]
    return _address(data) - _address(mapping)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


class ExternalFiles:
    """The data files beside one model.

    Args:
        base_dir: the model's folder; None if it is not known.
    """

    def __init__(self, base_dir: Path | None) -> None:
        self._root = None if base_dir is None else base_dir.resolve()
        self._found: dict[str, tuple[Path, int | None]] = {}
        self._maps = FileMaps()

    def bytes_of(self, tensor: TensorProto) -> np.ndarray:
        """The bytes of an external tensor as a uint8 view of its file, of which nothing is read.

        Raises:
            ModelError: the file is missing, ends too early, or lies outside of the folder; or offset and length are
                no numbers that fit.
        """
        entry = entry_of(tensor)
        path, size = self._file(tensor, entry.location)
        check_in_file(tensor, entry, path, size)
        try:
            return self._maps.view(FileRange(str(path), entry.offset, entry.nbytes))
        except (OSError, ValueError) as error:
            raise ModelError(
                f"external data file {path} of initializer {tensor.name!r} cannot be mapped "
                f"({getattr(error, 'strerror', None) or error}); each file takes a descriptor, so the limit of open "
                "files (ulimit -n) has to be above their number"
            ) from error

    def _file(self, tensor: TensorProto, location: str) -> tuple[Path, int | None]:
        """The file, with its size in bytes; None where it is missing."""
        if location in self._found:
            return self._found[location]
        if self._root is None:
            raise ModelError(f"initializer {tensor.name!r} is external data, but the model's folder is not known")
        path = file_in(self._root, tensor, location)
        found = self._found[location] = (path, path.stat().st_size if path.is_file() else None)
        return found
