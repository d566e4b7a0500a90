"""Write models atomically: a final name never holds a file that is written in part."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto

from passes.errors import ModelError, UsageError
from passes.load.tensors import entry_of
from passes.weights.detached import UNREAD, DetachedModel, inner_tensors
from passes.weights.mapped import ExternalFiles, append_page, find_file_range
from passes.weights.stand_ins import inline, point_to
from passes.worker.platforms import lock, open_folder

EXTERNAL_FROM_BYTES: Final = 100 * 2**20


def save(
    model: DetachedModel,
    path: Path,
    external_from: int = EXTERNAL_FROM_BYTES,
    check: Callable[[Path], object] = lambda _: None,
    *,
    referring: bool = False,
    source: tuple[DetachedModel, Path] | None = None,
) -> None:
    """Write `model` to `path`; above `external_from` bytes its weights go to a `.data` file next to it.

    Weights are streamed from their files, not collected in memory, and equal weights are written once. The data file is
    named by its content and written before the model that refers to it; the old data file is removed last. So `path` is
    a complete, valid model at every moment.

    Args:
        model: the model to write.
        path: the file of the model.
        external_from: bytes of the attached model above which its weights go to a data file.
        check: called with the written model before it takes its place; if it raises, the old files do not change.
        referring: weights in files of the model's own folder stay there, and the model points to them. Only other
            weights are written, to the `.data` file; and the model's metadata asks readers to leave its weights unread.
        source: a model as it was read, with its path next to `path`. If its weights are in files, and it shares a tenth
            of their bytes or more, it is rewritten to point into the `.data` file of `path` for shared weights, and
            keeps only its other weights in its own file.

    Raises:
        OSError: the disk is full or the folder cannot be written; the old files do not change.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    proto = model.copy_proto()
    with _alone_in(path.parent) as is_locked:
        if is_locked:
            _drop(_leftovers_of(path))
        before = _data_files_of(path)
        if referring:
            _refer(model, proto, path)
        ranges: dict[str, _DataRange] = {}
        if referring or model.nbytes() > external_from:
            ranges = _write_data(model, proto, path)
        for tensor in proto.graph.initializer:
            weight = model.weight(tensor)
            if weight is not None and tensor.data_location != TensorProto.EXTERNAL:
                inline(tensor, weight.data)
        try:
            with replace_when_done(path) as out:
                out.write_bytes(proto.SerializeToString())
                check(out)
        except BaseException:
            _drop(_data_files_of(path) - before)
            raise
        if source is not None and source[0].nbytes() > external_from and _is_worth_sharing(*source, before, ranges):
            _point_to_shared(*source, ranges)
        _drop(_data_files_of(path) - _files_of(ranges, path.parent))


def _is_worth_sharing(model: DetachedModel, path: Path, before: set[Path], shared: Mapping[str, _DataRange]) -> bool:
    """Whether the file `path`, from which `model` was read, should be written again with weights in shared files: these
    are a tenth of its bytes, or it points into a data file of `before`, which goes now."""
    weights = model.weights.values()
    common = sum(weight.data.nbytes for weight in weights if weight.digest in shared)
    files = {file_range.path for weight in weights if (file_range := find_file_range(weight.data)) is not None}
    return common * LEAST_SHARE >= model.nbytes() or not files.isdisjoint(str(file.resolve()) for file in before)


LEAST_SHARE: Final = 10
"""A model is written again if that saves at least one part in this many of its bytes."""


def _point_to_shared(model: DetachedModel, path: Path, shared: Mapping[str, _DataRange]) -> None:
    """Write `path` again, from which `model` was read, with weights that point into shared files."""
    proto = onnx.load(path, load_external_data=False)
    read = model.index.initializers
    for tensor in proto.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            tensor.CopyFrom(read[tensor.name])
    files = ExternalFiles(path.parent)
    for tensor in inner_tensors(proto):
        if tensor.data_location == TensorProto.EXTERNAL:
            inline(tensor, files.bytes_of(tensor))
    ranges = _write_data(model, proto, path, shared)
    with replace_when_done(path) as out:
        out.write_bytes(proto.SerializeToString())
    olds = {*_data_files_of(path), path.with_name(f"{path.name}.data")}
    _drop(olds - _files_of(ranges, path.parent))


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[bool]:
    """Lock `folder` against other threads and processes that save: the last would remove the others' data files.

    Yields:
        whether it is locked; not every system can lock a folder.
    """
    with open_folder(folder) as handle:
        lock(handle)
        yield handle is not None


def _data_files_of(path: Path) -> set[Path]:
    """The data files that `_write_data` has written for the model `path`; a name such as `m[1].onnx` is no pattern."""
    own = re.compile(re.escape(path.name) + r"\.[0-9a-f]{12}\.data")
    return {file for file in path.parent.iterdir() if own.fullmatch(file.name)}


def _leftovers_of(path: Path) -> set[Path]:
    """The files that a save of `path` was writing when its process was killed."""
    own = re.compile(rf"\.{re.escape(path.name)}(\.[0-9a-f]{{12}}\.data)?\.\d+\.\d+\.tmp")
    return {file for file in path.parent.iterdir() if own.fullmatch(file.name)}


def _drop(files: set[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def _refer(model: DetachedModel, proto: onnx.ModelProto, path: Path) -> None:
    """Point initializers of `proto` to the files next to `path` that already hold their data."""
    folder, own = str(path.parent.resolve()), f"{path.name}."
    for tensor in proto.graph.initializer:
        weight = model.weight(tensor)
        file_range = None if weight is None else find_file_range(weight.data)
        if file_range is None:
            continue
        parent, name = os.path.split(file_range.path)
        if parent == folder and not (name.startswith(own) and name.endswith(".data")):  # saving removes that file
            point_to(tensor, name, file_range.offset, file_range.nbytes)
    if all(entry.key != UNREAD for entry in proto.metadata_props):
        proto.metadata_props.add(key=UNREAD, value="weights lie in files of others; they are known by their places")


_DataRange = tuple[str, int, int]
"""The position of a weight: name of the file, offset and bytes."""


def _write_data(
    model: DetachedModel, proto: onnx.ModelProto, path: Path, shared: Mapping[str, _DataRange] | None = None
) -> dict[str, _DataRange]:
    """Write the weights of `proto`'s stand-ins to a file, and point the initializers to it.

    Args:
        model: the model with the weights.
        proto: a copy of its proto, which is changed.
        path: the file of the model, after which the data file is named.
        shared: the file ranges of weights that are already in a file, by their digests.

    Returns:
        The file ranges of the weights that were written, by their digests.
    """
    weights = [
        (tensor, weight)
        for tensor in proto.graph.initializer
        if tensor.data_location != TensorProto.EXTERNAL and (weight := model.weight(tensor)) is not None
    ]
    shared = shared or {}
    written = {weight.digest: weight for _, weight in weights if weight.digest not in shared}
    ranges: dict[str, _DataRange] = {}
    if written:
        content = hashlib.blake2b(b"".join(map(str.encode, written)), digest_size=6)
        data_path = path.with_name(f"{path.name}.{content.hexdigest()}.data")
        with replace_when_done(data_path) as temporary, temporary.open("wb") as file:
            for digest, weight in written.items():
                ranges[digest] = data_path.name, append_page(file, weight.data), weight.data.nbytes
    for tensor, weight in weights:
        point_to(tensor, *(ranges.get(weight.digest) or shared[weight.digest]))
    return ranges


def _files_of(ranges: Mapping[str, _DataRange], folder: Path) -> set[Path]:
    return {folder / name for name, _, _ in ranges.values()}


def save_together(models: Mapping[Path, DetachedModel], data: Path) -> None:
    """Write several models with one data file, which holds each weight of any of them once.

    Small tensors stay in the models. The old models go first, so that none is ever next to new weights.

    Args:
        models: path → model; the paths are next to `data`.
        data: the file of the weights.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    for path in models:
        path.unlink(missing_ok=True)
    ranges: dict[str, _DataRange] = {}
    with replace_when_done(data) as temporary, temporary.open("wb") as file:
        for model in models.values():
            for tensor in model.proto.graph.initializer:
                weight = model.weight(tensor)
                if weight is not None and weight.digest not in ranges:
                    ranges[weight.digest] = data.name, append_page(file, weight.data), weight.data.nbytes
    for path, model in models.items():
        proto = model.copy_proto()
        for tensor in proto.graph.initializer:
            if (weight := model.weight(tensor)) is not None:
                point_to(tensor, *ranges[weight.digest])
        with replace_when_done(path) as temporary:
            temporary.write_bytes(proto.SerializeToString())


@contextlib.contextmanager
def replace_when_done(path: Path) -> Iterator[Path]:
    """Write a file that takes its place when it is complete. Otherwise it is removed, and an old file stays.

    Args:
        path: the final path. A device or a pipe, such as /dev/stdout, is written as it is.

    Yields:
        A temporary path in the same folder, unique to this process and thread.
    """
    if path.parent == Path("/dev") or (path.exists() and not path.is_file() and not path.is_dir()):
        yield path
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # its folder may be missing too
            temporary.unlink()


@contextlib.contextmanager
def replace_folder_when_done(folder: Path) -> Iterator[Path]:
    """Write a folder that takes its place when it is complete. Otherwise it is removed, and an old folder stays.

    Args:
        folder: the final path.

    Yields:
        A temporary folder next to it, unique to this process.
    """
    fresh, old = (folder.with_name(f".{folder.name}.{state}.{os.getpid()}.tmp") for state in ("new", "old"))
    fresh.mkdir(parents=True)
    try:
        yield fresh
        with contextlib.suppress(FileNotFoundError):
            folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def write_model(model: DetachedModel, path: str | os.PathLike[str]) -> None:
    """Write a model to a path that a user has named.

    Args:
        model: the model; above 100 MB its weights go to a file next to it.
        path: the file to write.

    Raises:
        UsageError: it is no path of a file, or nothing can be written there; an existing file is unchanged.
    """
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"found {type(path).__name__}, expected the path of a file, such as 'model.onnx'")
    with write_errors(path):
        if Path(path).is_dir():
            raise UsageError(f"{path} is a folder; expected a file, such as {Path(path) / 'model.onnx'}")
        save(model, Path(path), referring=bool(model.unread()))


def files_of_model(path: Path) -> list[Path]:
    """An ONNX file, and the files that hold its weights; the ONNX file alone where it cannot be read."""
    try:
        model = onnx.load(path, load_external_data=False)
        tensors = (*model.graph.initializer, *inner_tensors(model))
        names = {entry_of(tensor).location for tensor in tensors if tensor.data_location == TensorProto.EXTERNAL}
    except (OSError, DecodeError, ModelError):
        return [path]
    return [path, *(path.parent / name for name in sorted(names))]


@contextlib.contextmanager
def write_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn whatever keeps a file from being written into a UsageError: a full disk, a folder, no such path.

    For code that does nothing but write: elsewhere an OSError may be a bug.

    Args:
        path: the file that is written.

    Raises:
        UsageError: the block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(describe_write_error(path, error)) from error
    except ValueError as error:  # a NUL byte in the path, or "." and "/", of which pathlib has no name
        if "empty name" in str(error):
            raise UsageError(describe_write_error(path, OSError(errno.EISDIR, ""))) from error
        if "null" not in str(error):
            raise
        raise UsageError(f"cannot write to {str(path)!r}: the name holds a NUL byte; give another file") from error


def write_file(path: Path, text: str) -> None:
    """Write a text to a path that a user has named; a file that is there stays until the new one is complete.

    Raises:
        UsageError: it cannot be written.
    """
    with write_errors(path), replace_when_done(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replace_tensors(path: Path) -> Iterator[Path]:
    """Yield a temporary path for safetensors to write to; the file takes the place of `path` once it is whole.

    Raises:
        UsageError: the disk is full, or nothing can be written there; what was there before is as it was.
    """
    import safetensors  # onnx files need none

    with write_errors(path), replace_when_done(path) as temporary:
        try:
            yield temporary
        except safetensors.SafetensorError as error:  # it has the number of the system's error in its text alone
            number = SYSTEM_ERROR.search(str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def describe_write_error(path: object, error: OSError) -> str:
    """The sentence for a file that cannot be written."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno == errno.EEXIST:  # a folder was to be made there
        reason = f"{error.filename} is no folder"
    if error.errno == errno.EISDIR:
        reason = "it is a folder; name a file in it"
    return f"cannot write to {path}: {reason}; what was there before is unharmed"


SYSTEM_ERROR: Final = re.compile(r"\(os error (\d+)\)")
