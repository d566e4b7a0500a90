"""The files of an IR: the JSON, packed with zstd where its name ends in .zst, and large constants next to it.

Both are written under a temporary name and renamed, the constants first: they are named by content, so at every moment
the existing JSON has its constants. A save that fails leaves the old files.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import orjson
import torch
from blake3 import blake3

from passes.suggest import describe_argument
from passes.weights.files import replace_when_done
from pipeline.torch_ir.constants import write_constant
from pipeline.torch_ir.errors import NoIRFile, SerializationError

PACKED = ".zst"
LEVEL = 9
"""Of zstd: a graph of 25 MB takes a second, and becomes 40 times smaller."""

DIGEST = 12
"""Bytes of the digest in the name of a file of constants."""

MAGIC = b"\x28\xb5\x2f\xfd"
"""How a file of zstd begins (RFC 8878)."""

AGAIN = "copy it again from where it was saved, or save the IR again"


def save(
    path: Path, sections: Iterable[tuple[str, Any]], constants: Mapping[str, torch.Tensor], threshold: float
) -> None:
    """Write `sections`, of which the last are the nodes, and constants; those over `threshold` bytes apart.

    The file of constants that only the replaced JSON named is removed.

    Raises:
        SerializationError: a file cannot be written, and what was there stays.
    """
    apart: dict[str, torch.Tensor] = {}
    written = {key: write_constant(key, tensor, apart, threshold) for key, tensor in constants.items()}
    large = path.with_name(f"{_prefix(path)}{_digest(apart)}.safetensors")
    written |= {key: {"file": large.name, **written[key]} for key in apart}
    replaced = _files_of_replaced(path)
    with _replacing(path) as temporary, _open_for_writing(temporary, packed=path.suffix == PACKED, named=path) as file:
        for piece in _json_pieces(sections, written):
            file.write(piece.encode())
        if apart:
            _save_tensors(large, apart)  # in place before the JSON that names it
    for name in replaced - {large.name}:
        path.with_name(name).unlink(missing_ok=True)


def load(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, torch.Tensor]]]:
    """What the JSON of `path` holds, and the tensors in the files that it names.

    Raises:
        NoIRFile: there is no such file (a FileNotFoundError too).
        SerializationError: a file cannot be read or is damaged, or that of the constants is gone.
    """
    data = _read_json(path)
    while True:
        names = _files_in(data)
        try:
            return data, {name: _read_tensors(path, name) for name in names}
        except _MissingConstantsError:
            data = _read_json(path)
            if _files_in(data) == names:
                raise
            # a save has put another JSON in place meanwhile, and removed what the first one named


@contextmanager
def explain_errors(path: Path, done: str) -> Iterator[None]:
    """Turn any error inside into a SerializationError: `path` cannot be `done` ("read", "written")."""
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


class _MissingConstantsError(SerializationError):
    """A file of constants is missing: it was not copied, or a concurrent save has replaced it."""


def _prefix(path: Path) -> str:
    """How the names of the files of constants of `path` begin."""
    return f"{path.name}.constants."


def _files_in(data: Mapping[str, Any]) -> set[str]:
    """The names of the files that hold large constants of the JSON; what is no constant is refused when it is read."""
    constants = data.get("constants")
    entries = constants.values() if isinstance(constants, Mapping) else ()
    return {str(entry["file"]) for entry in entries if isinstance(entry, Mapping) and "file" in entry}


def _files_of_replaced(path: Path) -> set[str]:
    """The files of constants that the JSON in the place of `path` names."""
    prefix = _prefix(path)
    with suppress(OSError, SerializationError):  # nothing is there, or it may not be listed or is damaged: that stays
        here = {file.name for file in path.parent.iterdir() if file.name.startswith(prefix)}
        return here & _files_in(_read_json(path)) if here else set()
    return set()


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path; on success, the file there replaces `path`.

    Raises:
        SerializationError: the file cannot be written, and what was there stays.
    """
    with explain_errors(path, "written"):
        if path.is_dir():
            raise IsADirectoryError
        with replace_when_done(path) as temporary:
            yield temporary


def _json_pieces(sections: Iterable[tuple[str, Any]], constants: Mapping[str, Any]) -> Iterator[str]:
    """The JSON in pieces, a line for each node, so that a large graph is never one string."""
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode
    opening = "{"
    for key, part in (*sections, ("constants", constants)):
        yield f"{opening}{encode(key)}:"
        opening = ",\n"
        if key == "nodes":
            yield "["
            for index, node in enumerate(part):
                yield f",\n{encode(node)}" if index else f"\n{encode(node)}"
            yield "]"
        else:
            yield encode(part)
    yield "}\n"


def _save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    from safetensors.torch import save  # whose `save_file` makes a file that only its owner may read

    with _replacing(path) as temporary:
        temporary.write_bytes(save(dict(tensors)))


def _read_tensors(path: Path, name: str) -> Mapping[str, torch.Tensor]:
    """The tensors of the safetensors file `name` in the folder of `path`.

    Raises:
        _MissingConstantsError: there is no such file.
        SerializationError: it cannot be read, or the name leads out of the folder.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    file = path.parent / name
    if not name or Path(name).name != name:
        raise SerializationError(f"{path} names the file {name!r} for its constants, which is not in the same folder")
    with explain_errors(file, "read"):
        try:
            tensors = load(file.read_bytes())
        except FileNotFoundError as error:
            raise _MissingConstantsError(
                f"{path} has its large constants in {name}, which is not in the same folder; copy it too"
            ) from error
        except SafetensorError as error:
            raise SerializationError(
                f"{file}, the constants of {path.name}, ends early or is damaged ({error}); {AGAIN}"
            ) from error
    if file.stem.rpartition(".")[2] != _digest(tensors):
        raise SerializationError(f"{file}, the constants of {path.name}, is damaged: it holds other bytes; {AGAIN}")
    return tensors


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = blake3()
    for key in sorted(tensors):
        digest.update(f"{key}\0{tensors[key].numel()}\0".encode())
        digest.update(tensors[key].numpy().data)
    return digest.hexdigest(DIGEST)


def _read_json(path: Path) -> Mapping[str, Any]:
    """The object in the file `path`.

    Raises:
        NoIRFile: there is no such file (a FileNotFoundError too).
        SerializationError: it is damaged, or it is no JSON object.
    """
    with explain_errors(path, "read"):
        text = path.read_bytes()
        if path.suffix == PACKED:
            text = _unpack(path, text)
        elif text.startswith(MAGIC):
            raise SerializationError(f"{path} is packed with zstd; rename it to {path.name}{PACKED}")
        return parse_json(str(path), text)


def parse_json(what: str, text: bytes) -> Mapping[str, Any]:
    """The JSON object `text` of the file `what`.

    orjson is quicker; Python's own takes the NaN and Infinity in files of pytorch-ir, and other encodings.
    """
    try:
        data = orjson.loads(text)
    except orjson.JSONDecodeError:
        data = _parse_by_python(what, text)
    if not isinstance(data, dict):
        raise SerializationError(f"{what} holds {describe_argument(data)}; expected the object that IR.save writes")
    return data


def _parse_by_python(what: str, text: bytes) -> Any:
    try:
        return json.loads(text)
    except UnicodeDecodeError as error:
        said = (
            _other_than_json(text) or f"is not in UTF-8: byte {error.start} is {text[error.start : error.start + 1]!r}"
        )
    except RecursionError:
        said = "is nested too deeply"
    except json.JSONDecodeError as error:
        said = _other_than_json(text) or _place_of_damage(text, error)
    raise SerializationError(f"Invalid JSON: {what} {said}; expected the JSON that IR.save writes: {AGAIN}")


def _other_than_json(text: bytes) -> str:
    start = text.removeprefix(codecs.BOM_UTF8).lstrip()
    if not start:
        return "is empty"
    return "" if start.startswith((b"{", b"[")) else f"is no JSON: it begins with {start[:12]!r}"


def _place_of_damage(text: bytes, error: json.JSONDecodeError) -> str:
    if not text.rstrip().endswith((b"}", b"]")) or error.pos >= len(error.doc.rstrip()):
        return f"ends early, after {len(text)} bytes in line {error.doc.count(chr(10)) + 1}"
    return f"is damaged in line {error.lineno}, column {error.colno} ({error.msg})"


@contextmanager
def _open_for_writing(path: Path, *, packed: bool, named: Path) -> Iterator[IO[bytes]]:
    with path.open("wb") as file:
        if not packed:
            yield file
            return
        packer = _zstandard(named).ZstdCompressor(level=LEVEL, write_checksum=True)
        with packer.stream_writer(file, closefd=False) as packing:
            yield packing


def _unpack(path: Path, packed: bytes) -> bytes:
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
