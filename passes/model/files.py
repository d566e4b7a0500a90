"""Write models so that nothing half-written ever stands under a final name."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import onnx
from onnx import TensorProto

from passes.model.weights import DetachedModel, clear_data, inline

__all__ = ["EXTERNAL_FROM_BYTES", "replace_when_done", "save"]

EXTERNAL_FROM_BYTES: Final = 100 * 2**20
_ALIGNMENT: Final = 4096
"""Offsets in a data file are multiples of a page, so that readers may map each tensor by itself."""


def save(
    model: DetachedModel,
    path: Path,
    external_from: int = EXTERNAL_FROM_BYTES,
    check: Callable[[Path], object] = lambda _: None,
) -> None:
    """Write `model` to `path`; above `external_from` bytes its weights go to a `.data` file beside it.

    Weights are streamed from where they lie, never joined in memory. The data file is named by its content and in place
    before the model that names it; the old one goes last. So at every moment `path` is a whole, valid model.

    Args:
        check: is given the written model before it takes its place; if it raises, the old files are as they were.

    Raises:
        OSError: the disk is full or the folder cannot be written; the old files are as they were.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    before = set(path.parent.glob(f"{path.name}.*.data"))
    data_path = _write_data(model, proto, path) if model.nbytes() > external_from else None
    for tensor in proto.graph.initializer:
        weight = model.weight(tensor)
        if weight is not None and tensor.data_location != TensorProto.EXTERNAL:
            inline(tensor, weight.data)
    try:
        with replace_when_done(path) as out:
            out.write_bytes(proto.SerializeToString())
            check(out)
    except BaseException:
        _drop(set(path.parent.glob(f"{path.name}.*.data")) - before)
        raise
    _drop(set(path.parent.glob(f"{path.name}.*.data")) - {data_path})


def _drop(files: set[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def _write_data(model: DetachedModel, proto: onnx.ModelProto, path: Path) -> Path:
    """Write the weights that `proto`'s initializers stand for, and make those initializers point to the file."""
    weights = [(tensor, model.weight(tensor)) for tensor in proto.graph.initializer]
    content = hashlib.blake2b(b"".join(weight.digest.encode() for _, weight in weights if weight), digest_size=6)
    data_path = path.with_name(f"{path.name}.{content.hexdigest()}.data")
    with replace_when_done(data_path) as temporary, temporary.open("wb") as file:
        for tensor, weight in weights:
            if weight is None:
                continue
            offset = file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
            file.write(weight.data.data)
            clear_data(tensor)
            tensor.data_location = TensorProto.EXTERNAL
            where = {"location": data_path.name, "offset": str(offset), "length": str(weight.data.nbytes)}
            for key, value in where.items():
                tensor.external_data.add(key=key, value=value)
    return data_path


@contextlib.contextmanager
def replace_when_done(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it takes `path`'s place, otherwise it is removed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # there was no place for it either
            temporary.unlink()
