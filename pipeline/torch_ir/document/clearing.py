"""What earlier saves have left beside an IR: constants that its JSON names no longer, and files of savers that died.

Nobody can tell them from files of a save that goes on, whose JSON is still to come. So every saver holds a lock on the
folder, which others may share; and clears away only if it can have the lock for itself in the end. Nobody waits for
another save: whoever is not alone leaves it to a later one, and so does everybody on a file system without locks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from passes.worker.platforms import lock, opened_folder
from pipeline.torch_ir.document.files import read, sidecar_prefix
from pipeline.torch_ir.document.head import files_in
from pipeline.torch_ir.errors import SerializationError

__all__ = ["clearing"]


@contextmanager
def clearing(path: Path, constants: Path) -> Iterator[None]:
    """Save `path` and its `constants` inside; then what is not needed goes, if nobody else saves in their folder."""
    if not os.access(path.parent, os.R_OK):  # one that may be written to, and not listed
        yield
        return
    with opened_folder(path.parent) as folder:
        is_shared = _try_lock(folder, shared=True)
        yield
        if is_shared and _try_lock(folder, wait=False):
            with suppress(OSError, SerializationError):  # the IR is saved; and what is not understood stays
                _clear(path, constants)


def _try_lock(folder: int | None, *, shared: bool = False, wait: bool = True) -> bool:
    try:
        lock(folder, shared=shared, wait=wait)
    except OSError:  # there is another saver, or there are no locks
        return False
    return folder is not None


def _clear(path: Path, own: Path) -> None:
    prefix = sidecar_prefix(path)
    unfinished = re.compile(rf"\.({re.escape(prefix)}[0-9a-f]+\.safetensors|{re.escape(path.name)})(\.\d+)+\.tmp")
    here = list(path.parent.iterdir())
    old = [file for file in here if unfinished.fullmatch(file.name)]
    constants = [file for file in here if file.name.startswith(prefix) and file.suffix == ".safetensors"]
    if constants not in ([], [own]):
        named = files_in(read(path))  # another saver's JSON may be in place by now
        old += [file for file in constants if file.name not in named]
    for file in old:
        file.unlink(missing_ok=True)
