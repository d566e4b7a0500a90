"""The files of an IR, read as they belong together, also while somebody saves another IR in their place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pipeline.torch_ir.document import files
from pipeline.torch_ir.document.head import files_in

__all__ = ["whole"]


def whole(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, torch.Tensor]]]:
    """What the JSON of `path` holds, and the tensors in the files that it names.

    Raises:
        SerializationError: a file cannot be read, or that of the constants is gone.
    """
    while True:
        was = _stamp(path)
        data = files.read(path)
        try:
            return data, {name: files.read_tensors(path, name) for name in files_in(data, str(path))}
        except files.Gone:
            if _stamp(path) == was:
                raise
            # A save has put another JSON in place meanwhile, and removed what this one named.


def _stamp(path: Path) -> object:
    """Other for another file in its place; None where there is none, as its reader will say."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
