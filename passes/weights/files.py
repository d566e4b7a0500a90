"""Write models so that nothing half-written ever stands under a final name."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import onnx
from onnx import TensorProto

from passes.weights.detached import UNREAD, DetachedModel, inner_tensors
from passes.weights.mapped import ExternalFiles, place_of
from passes.weights.stand_ins import inline, point_to
from passes.worker.platforms import lock, open_folder

__all__ = ["EXTERNAL_FROM_BYTES", "replace_when_done", "save"]

EXTERNAL_FROM_BYTES: Final = 100 * 2**20
_ALIGNMENT: Final = 4096
"""Offsets in a data file are multiples of a page, so that readers may map each tensor by itself."""


def save(
    model: DetachedModel,
    path: Path,
    external_from: int = EXTERNAL_FROM_BYTES,
    check: Callable[[Path], object] = lambda _: None,
    *,
    referring: bool = False,
    source: tuple[DetachedModel, Path] | None = None,
) -> None:
    """Write `model` to `path`; above `external_from` bytes its weights go to a `.data` file beside it.

    Weights are streamed from where they lie, never joined in memory, and equal ones are written once. The data file is
    named by its content and in place before the model that names it; the old one goes last. So at every moment `path`
    is a whole, valid model.

    Args:
        check: is given the written model before it takes its place; if it raises, the old files are as they were.
        referring: weights that lie in files of the model's own folder stay there, and the model points at them. Only
            the others are written, to the `.data` file; and the model says that its weights are to stay unread.
        source: a model as it was read, with its path beside `path`. If its weights lie in files, it is made to point
            into the `.data` file of `path` for those that both have, and keeps only the others in a file of its own.

    Raises:
        OSError: the disk is full or the folder cannot be written; the old files are as they were.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    with _alone_in(path.parent):
        before = set(path.parent.glob(f"{path.name}.*.data"))
        if referring:
            _refer(model, proto, path)
        places: dict[str, _Place] = {}
        if referring or model.nbytes() > external_from:
            places = _write_data(model, proto, path)
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
        if source is not None and source[0].nbytes() > external_from:
            _point_to_shared(*source, places)  # it may point into the data file that goes now
        _drop(set(path.parent.glob(f"{path.name}.*.data")) - _files_of(places, path.parent))


def _point_to_shared(model: DetachedModel, path: Path, shared: Mapping[str, _Place]) -> None:
    """Write `path` again, from which `model` was read: all as it was, but for where its weights lie."""
    proto = onnx.load(path, load_external_data=False)
    read = {tensor.name: tensor for tensor in model.proto.graph.initializer}
    for tensor in proto.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            tensor.CopyFrom(read[tensor.name])
    files = ExternalFiles(path.parent)
    for tensor in inner_tensors(proto.graph):
        if tensor.data_location == TensorProto.EXTERNAL:
            inline(tensor, files.bytes_of(tensor))
    places = _write_data(model, proto, path, shared)
    with replace_when_done(path) as out:
        out.write_bytes(proto.SerializeToString())
    _drop(set(path.parent.glob(f"{path.name}.*data")) - _files_of(places, path.parent))


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other thread or process saves here: the last to finish would drop the data file of another."""
    with open_folder(folder) as handle:
        lock(handle)
        yield


def _drop(files: set[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def _refer(model: DetachedModel, proto: onnx.ModelProto, path: Path) -> None:
    """Make initializers of `proto` point to where their data lies already, if that is a file beside `path`."""
    folder, own = str(path.parent.resolve()), f"{path.name}."
    for tensor in proto.graph.initializer:
        weight = model.weight(tensor)
        place = None if weight is None else place_of(weight.data)
        if place is None:
            continue
        parent, name = os.path.split(place.path)
        if parent == folder and not (name.startswith(own) and name.endswith(".data")):  # the model's own will go
            point_to(tensor, name, place.offset, place.nbytes)
    if all(entry.key != UNREAD for entry in proto.metadata_props):
        proto.metadata_props.add(key=UNREAD, value="weights lie in files of others; they are known by their places")


_Place = tuple[str, int, int]
"""Of a weight: name of the file, offset and bytes."""


def _write_data(
    model: DetachedModel, proto: onnx.ModelProto, path: Path, shared: Mapping[str, _Place] | None = None
) -> dict[str, _Place]:
    """Write the weights that `proto`'s initializers stand for, and make those initializers point to the file.

    Args:
        shared: where weights lie already, by their digests.

    Returns:
        The places of the weights that were written, by their digests.
    """
    weights = [
        (tensor, weight)
        for tensor in proto.graph.initializer
        if tensor.data_location != TensorProto.EXTERNAL and (weight := model.weight(tensor)) is not None
    ]
    shared = shared or {}
    written = {weight.digest: weight for _, weight in weights if weight.digest not in shared}
    places: dict[str, _Place] = {}
    if written:
        content = hashlib.blake2b(b"".join(map(str.encode, written)), digest_size=6)
        data_path = path.with_name(f"{path.name}.{content.hexdigest()}.data")
        with replace_when_done(data_path) as temporary, temporary.open("wb") as file:
            for digest, weight in written.items():
                offset = file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
                file.write(weight.data.data)
                places[digest] = (data_path.name, offset, weight.data.nbytes)
    for tensor, weight in weights:
        point_to(tensor, *(places.get(weight.digest) or shared[weight.digest]))
    return places


def _files_of(places: Mapping[str, _Place], folder: Path) -> set[Path]:
    return {folder / name for name, _, _ in places.values()}


@contextlib.contextmanager
def replace_when_done(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it takes `path`'s place, otherwise it is removed.

    No other process and no other thread has the same one.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # there was no place for it either
            temporary.unlink()
