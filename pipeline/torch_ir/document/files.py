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

import torch
from blake3 import blake3

from passes.weights.files import replace_when_done
from pipeline.torch_ir.document.parse import AGAIN, parsed
from pipeline.torch_ir.errors import NoIRFile, SerializationError

__all__ = [
    "Gone",
    "explained",
    "read",
    "read_tensors",
    "sidecar_name",
    "sidecar_prefix",
    "write",
    "write_tensors",
    "written",
]

PACKED = ".zst"
LEVEL = 9
"""Of zstd: a graph of 25 MB takes a second, and becomes 40 times smaller."""

DIGEST = 12
"""Bytes of the digest in the name of a file of constants."""

MAGIC = b"\x28\xb5\x2f\xfd"
"""How a file of zstd begins (RFC 8878)."""


class Gone(SerializationError):
    """A file of constants is not there: it was not copied, or a save of this moment has put others in its place."""


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, which it becomes in the end.

    Raises:
        SerializationError: the file cannot be written, and what was there stays.
    """
    with explained(path, "written"):
        if path.is_dir():
            raise IsADirectoryError
        with replace_when_done(path) as temporary:
            yield temporary


def write(temporary: Path, pieces: Iterator[str], named: Path) -> None:
    """The text of `pieces` in the file `temporary`, packed if it is to be `named` so."""
    with _opened(temporary, named) as file:
        for piece in pieces:
            file.write(piece.encode())


def write_tensors(temporary: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """`tensors` (vectors of bytes) as a safetensors file, all of it under the name `temporary`.

    safetensors' own `save_file` has a hidden name of its own for the time, which nobody knows to remove after a kill,
    and makes a file that only its owner may read.
    """
    places: dict[str, Any] = {}
    end = 0
    for key, tensor in tensors.items():
        start, end = end, end + tensor.numel()
        places[key] = {"dtype": "U8", "shape": [tensor.numel()], "data_offsets": [start, end]}
    header = json.dumps(places, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the bytes begin at a multiple of 8
    with temporary.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors.values():
            file.write(tensor.numpy().data)


def read_tensors(path: Path, name: str) -> Mapping[str, torch.Tensor]:
    """The tensors of the safetensors file `name` beside `path`.

    Raises:
        Gone: there is no such file.
        SerializationError: it cannot be read, or the name leads out of the folder.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    beside = path.with_name(Path(name).name)
    if name != beside.name:
        raise SerializationError(f"{path} names the file {name!r} for its constants, which is not beside it")
    with explained(beside, "read"):
        if beside.is_dir():
            raise IsADirectoryError
        try:
            tensors = load_file(beside)
        except Exception as error:  # safetensors opens the file twice, and torch says in words of its own that it went
            if not beside.exists():
                raise Gone(f"{path} has its large constants in {name}, which is not beside it; copy it too") from error
            if not isinstance(error, SafetensorError):
                raise
            raise SerializationError(
                f"{beside}, the constants of {path.name}, ends early or is damaged ({error}); {AGAIN}"
            ) from error
    digest = beside.stem.rpartition(".")[2]
    if len(digest) == 2 * DIGEST and digest != _digest(tensors):  # older files have a shorter one, of other things
        raise SerializationError(f"{beside}, the constants of {path.name}, is damaged: it holds other bytes; {AGAIN}")
    return tensors


def read(path: Path) -> Mapping[str, Any]:
    """What the JSON of `path` holds.

    Raises:
        NoIRFile: there is no such file (a FileNotFoundError too).
        SerializationError: it is damaged, or it is no JSON object.
    """
    with explained(path, "read"):
        text = path.read_bytes()
        if path.suffix == PACKED:
            text = _unpacked(path, text)
        elif text.startswith(MAGIC):
            raise SerializationError(f"{path} is packed with zstd; rename it to {path.name}{PACKED}")
        return parsed(str(path), text)


def sidecar_prefix(path: Path) -> str:
    """How the files of constants beside `path` begin."""
    return f"{path.name}.constants."


def sidecar_name(prefix: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """The file of `tensors` (vectors of bytes), called by what it holds."""
    return f"{prefix}{_digest(tensors)}.safetensors"


@contextmanager
def explained(path: Path, done: str) -> Iterator[None]:
    """What goes wrong inside is a SerializationError about `path`, which cannot be `done` ("read", "written")."""
    try:
        yield
    except SerializationError:
        raise
    except IsADirectoryError as error:
        raise SerializationError(f"{path} cannot be {done}: it is a folder; expected a file, as in m.json") from error
    except FileNotFoundError as error:
        said = f"{path} cannot be {done}: there is no such file or folder"
        raise (NoIRFile(f"IR file not found: {said}") if done == "read" else SerializationError(said)) from error
    except OSError as error:
        raise SerializationError(f"{path} cannot be {done}: {error.strerror or error}") from error
    except Exception as error:  # a library's own
        raise SerializationError(f"{path} cannot be {done}: {error}") from error


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = blake3()
    for key in sorted(tensors):
        digest.update(f"{key}\0{tensors[key].numel()}\0".encode())
        digest.update(tensors[key].numpy().data)
    return digest.hexdigest(DIGEST)


@contextmanager
def _opened(path: Path, named: Path) -> Iterator[IO[bytes]]:
    with path.open("wb") as file:
        if named.suffix != PACKED:
            yield file
            return
        packer = _zstandard(named).ZstdCompressor(level=LEVEL, write_checksum=True)
        with packer.stream_writer(file, closefd=False) as packed:
            yield packed


def _unpacked(path: Path, packed: bytes) -> bytes:
    zstandard = _zstandard(path)
    if packed and not packed.startswith(MAGIC[: len(packed)]):
        raise SerializationError(
            f"{path} is no zstd file: it begins with {packed[:12]!r}; a file that is not packed is called .json"
        )
    unpacker = zstandard.ZstdDecompressor().decompressobj()
    try:
        text = unpacker.decompress(packed)
    except zstandard.ZstdError as error:
        raise SerializationError(f"{path} is damaged ({error}); {AGAIN}") from error
    if not unpacker.eof:
        raise SerializationError(f"{path} ends early, after {len(packed)} packed bytes; {AGAIN}")
    if unpacker.unused_data:
        raise SerializationError(f"{path} goes on for {len(unpacker.unused_data)} bytes after its end; {AGAIN}")
    return text


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise SerializationError(
            f"{path}: .zst needs the library zstandard, which is not installed; pip install 'onnxline[torch]'"
        ) from error
    return zstandard
