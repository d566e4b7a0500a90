"""Files mapped into memory, once each for all tensors in them, since a mapping holds a file descriptor.

Mapping a file reads nothing and takes no memory; pages are read from the file at first access.
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass
from io import FileIO
from mmap import ALLOCATIONGRANULARITY, PAGESIZE
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
from onnx import TensorProto

from passes.errors import ModelError
from passes.load.tensors import check_in_file, entry_of, file_in


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of bytes in a file: `nbytes` of `path`, starting at `offset`."""

    path: str
    offset: int
    nbytes: int


ALIGNMENT: Final = 4096
"""Offsets in a data file are multiples of a page, so that readers may map each tensor by itself."""


def append_page(file: BinaryIO, data: np.ndarray) -> int:
    """Write the bytes of a tensor at the next page of a file, and return the offset."""
    offset = -(-file.tell() // ALIGNMENT) * ALIGNMENT
    file.truncate(offset)
    file.seek(offset)
    file.write(data.data)
    release(data)
    return offset


class FileMaps:
    """Views of mapped files. Each file is mapped at its first view, and again when it has grown since."""

    def __init__(self) -> None:
        self._maps: dict[str, np.memmap] = {}

    def view(self, file_range: FileRange) -> np.ndarray:
        """The bytes at `file_range` as uint8, read-only.

        Raises:
            OSError: the file cannot be opened or mapped.
            ValueError: the file ends before `file_range` does.
        """
        if file_range.nbytes == 0:
            return np.empty(0, np.uint8)
        whole, end = self._maps.get(file_range.path), file_range.offset + file_range.nbytes
        if whole is None or whole.size < end:
            with FileIO(file_range.path) as file:
                whole = self._maps[file_range.path] = np.memmap(file, np.uint8, "r")
        if whole.size < end:
            raise ValueError(f"{file_range.path} has {whole.size} bytes, and {end} were asked for")
        return whole[file_range.offset : end]


def find_file_range(data: np.ndarray) -> FileRange | None:
    """The file range of `data`, if it is a view of a mapped file that still exists."""
    if not isinstance(data, np.memmap) or data.filename is None or data._mmap is None:  # type: ignore[attr-defined]
        return None
    if not Path(data.filename).exists():
        return None
    # numpy keeps the offset of the mapping; a view of it may begin later.
    mapped_from = data.offset - data.offset % ALLOCATIONGRANULARITY
    return FileRange(str(data.filename), mapped_from + _distance(data), data.nbytes)


def release(data: np.ndarray) -> None:
    """Give the memory of mapped data back; the next access reads it from its file again."""
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
    """The data files next to one model.

    Args:
        base_dir: the model's folder; None if it is not known.
    """

    def __init__(self, base_dir: Path | None) -> None:
        self._root = None if base_dir is None else base_dir.resolve()
        self._found: dict[str, tuple[Path, int | None]] = {}
        self._maps = FileMaps()

    def bytes_of(self, tensor: TensorProto) -> np.ndarray:
        """The bytes of an external tensor as a uint8 view of its file; nothing is read.

        Raises:
            ModelError: the file is missing, ends too early, or lies outside of the folder; or its offset
                and length do not fit the file.
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
