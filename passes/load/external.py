"""External data as a tensor declares it: a file inside of the model's folder, an offset and a length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from onnx import TensorProto

from passes.errors import ModelError
from passes.load.payload import byte_count, dtype_of

__all__ = ["ExternalEntry", "entry_of", "file_in"]

MOST_PATH: Final = 4096
"""Characters of a location: no file system takes longer ones."""


@dataclass(frozen=True, slots=True)
class ExternalEntry:
    """Where a tensor's bytes lie, relative to the model's folder."""

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
        ModelError: it lies outside of `folder`.
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
            "external data has to lie beside the model"
        )
    return path


def _number(tensor: TensorProto, entries: Mapping[str, str], key: str) -> int:
    text = entries.get(key) or "0"
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise ModelError(
            f"initializer {tensor.name!r} has {key} {text[:80]!r} in its external data, "
            "expected a whole number of 0 or more"
        )
    return int(text)
