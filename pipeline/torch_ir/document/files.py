"""Writing and reading the files of an IR: the JSON, packed with zstd where its name ends in .zst, and its constants.

Both are written under a temporary name and renamed, the constants first: they are named by content, so at every moment
the JSON that is there finds its own. A save that fails leaves what was there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import orjson
import torch

from passes.model.files import replace_when_done
from pipeline.torch_ir.errors import SerializationError

__all__ = ["read", "read_tensors", "remove_others", "sidecar_prefix", "write", "write_tensors"]

PACKED = ".zst"
LEVEL = 9
"""Of zstd: a graph of 25 MB takes a second, and becomes 40 times smaller."""


def write(path: Path, pieces: Iterator[str]) -> None:
    """The text of `pieces` in the file `path`, at once.

    Raises:
        SerializationError: the file cannot be written.
    """
    with _explained(path, "written"), replace_when_done(path) as temporary, _opened(temporary, path, "w") as file:
        for piece in pieces:
            file.write(piece.encode())


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """`tensors` (vectors of bytes) in the safetensors file `path`."""
    from safetensors.torch import save_file

    with _explained(path, "written"), replace_when_done(path) as temporary:
        save_file(dict(tensors), temporary)


def read_tensors(path: Path, name: str) -> Mapping[str, torch.Tensor]:
    """The tensors of the safetensors file `name` beside `path`.

    Raises:
        SerializationError: it cannot be read, or the name leads out of the folder.
    """
    from safetensors.torch import load_file

    beside = path.with_name(Path(name).name)
    if name != beside.name:
        raise SerializationError(f"{path} names the file {name!r} for its constants, which is not beside it")
    with _explained(beside, "read"):
        return load_file(beside)


def read(path: Path) -> Mapping[str, Any]:
    """What the JSON of `path` holds.

    Raises:
        SerializationError: there is no such file, or it is no JSON object.
    """
    with _explained(path, "read"), _opened(path, path, "r") as file:
        data = _parsed(file.read())
    if not isinstance(data, dict):
        raise SerializationError(f"{path} holds a {type(data).__name__}; expected the object that IR.save writes")
    return data


def sidecar_prefix(path: Path) -> str:
    """How the files of constants beside `path` begin."""
    return f"{path.name}.constants."


def _parsed(text: bytes) -> Any:
    """orjson is quicker; Python's own takes the NaN and Infinity in files of pytorch-ir, and says what is wrong."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)


def remove_others(path: Path, prefix: str, keep: str) -> None:
    """Remove what earlier saves of `path` have left: files beside it that begin with `prefix`, all but `keep`."""
    for old in path.parent.iterdir():
        if old.name.startswith(prefix) and old.suffix == ".safetensors" and old.name != keep:
            old.unlink(missing_ok=True)


@contextmanager
def _opened(path: Path, named: Path, mode: str) -> Iterator[IO[bytes]]:
    with path.open(f"{mode}b") as file:
        if named.suffix != PACKED:
            yield file
            return
        zstandard = _zstandard(named)
        if mode == "r":
            with zstandard.ZstdDecompressor().stream_reader(file) as unpacked:
                yield unpacked
        else:
            with zstandard.ZstdCompressor(level=LEVEL).stream_writer(file, closefd=False) as packed:
                yield packed


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise SerializationError(
            f"{path}: .zst needs the library zstandard, which is not installed; pip install 'onnxline[torch]'"
        ) from error
    return zstandard


@contextmanager
def _explained(path: Path, done: str) -> Iterator[None]:
    try:
        yield
    except SerializationError:
        raise
    except FileNotFoundError as error:
        raise SerializationError(f"{path} cannot be {done}: there is no such file or folder") from error
    except OSError as error:
        raise SerializationError(f"{path} cannot be {done}: {error.strerror or error}") from error
    except Exception as error:  # a library's own: malformed JSON, a damaged frame of zstd or header of safetensors
        raise SerializationError(f"{path} cannot be {done}: {error}") from error
