"""Reads the headers of a safetensors checkpoint: where each tensor is stored; no weight is read.

A shard begins with 8 bytes, the length of its header. Then comes the header, JSON that maps the name of a tensor to
dtype, shape and `data_offsets`, which count from the end of the header; then the data.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from onnx import TensorProto, helper

from passes.suggest import plural
from pipeline.errors import SourceError

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
LENGTH_BYTES: Final = 8
LONGEST_HEADER: Final = 100_000_000
"""The limit of the safetensors library."""
SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`nbytes` bytes from `offset` on in the file `shard`, row-major and little-endian. `dtype` is spelled `BF16`."""

    shard: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Shards:
    """The tensors of the checkpoint in `folder`, by the names that it gives them."""

    folder: Path
    tensors: Mapping[str, StoredTensor]

    def fingerprint(self) -> str:
        """Digest of the headers, and of size and time of each shard; weights are not read."""
        digest = hashlib.blake2b(digest_size=16)
        for shard in sorted({tensor.shard for tensor in self.tensors.values()}):
            status = os.stat(self.folder / shard)
            digest.update(f"{shard} {status.st_size} {status.st_mtime_ns}".encode())
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name} {tensor}".encode())
        return digest.hexdigest()


def read_shards(checkpoint: Path) -> Shards:
    """Read the headers of a checkpoint: a folder, its `model.safetensors.index.json`, or one `.safetensors` file.

    Raises:
        SourceError: listing all mistakes: shards that are missing, damaged, cut off, or links; tensors that are in no
            shard.
    """
    folder, names, placed = _find_shards(checkpoint)
    tensors: dict[str, StoredTensor] = {}
    mistakes: list[str] = []
    for name in names:
        try:
            tensors.update(_read_header(folder, name))
        except SourceError as mistake:
            mistakes.append(str(mistake))
    damaged = {mistake.partition(":")[0] for mistake in mistakes}
    lost = [name for name, shard in placed.items() if name not in tensors and shard not in damaged]
    if lost:
        mistakes.append(f"{INDEX}: it names tensors that are in no shard: {_names_text(lost)}")
    if mistakes:
        raise SourceError(
            f"checkpoint {folder}: {plural(len(mistakes), 'mistake')}; fetch it again, or what is missing\n  "
            + "\n  ".join(mistakes)
        )
    return Shards(folder, tensors)


def _find_shards(checkpoint: Path) -> tuple[Path, list[str], Mapping[str, str]]:
    """The folder of a checkpoint, the names of its shards, and the index: tensor → shard."""
    path = checkpoint
    if checkpoint.is_dir():
        names = (INDEX, SINGLE)
        path = next((checkpoint / name for name in names if (checkpoint / name).exists()), checkpoint / INDEX)
    if path.name.endswith(".index.json") and path.is_file():
        placed = read_index(path)
        return path.parent.resolve(), sorted(set(placed.values())), placed
    if path.suffix == ".safetensors" and path.is_file():
        return path.parent.resolve(), [path.name], {}
    raise SourceError(
        f"checkpoint {checkpoint}: found no {INDEX} and no {SINGLE}; a model can refer to weights "
        "only where they lie in safetensors"
    )


def read_index(path: Path) -> dict[str, str]:
    """Read an index: name of a tensor → its shard.

    Raises:
        SourceError: it is no index, or names a file in another folder.
    """
    try:
        placed = json.loads(path.read_bytes())["weight_map"]
        named = {str(name): str(shard) for name, shard in placed.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SourceError(f"checkpoint {path}: no index of shards; expected a mapping 'weight_map'") from error
    outside = sorted({shard for shard in named.values() if Path(shard).name != shard})
    if outside:  # an index comes with a download: it must not make us read elsewhere
        raise SourceError(f"checkpoint {path}: the shard {outside[0]!r} leaves the folder; expected plain file names")
    return named


def _read_header(folder: Path, name: str) -> Iterator[tuple[str, StoredTensor]]:
    path = folder / name
    if path.is_symlink():
        raise SourceError(
            f"{name}: it is a link to {path.readlink()}, which ONNX refuses for data of a model; "
            "the folder has to hold the files themselves (hf download … --local-dir FOLDER)"
        )
    if not path.is_file():
        raise SourceError(f"{name}: it is missing")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > min(size - LENGTH_BYTES, LONGEST_HEADER):
            raise SourceError(f"{name}: it has {size} bytes, and says that its header alone has {length}")
        text = file.read(length)
    try:
        header = dict(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise SourceError(f"{name}: its header is not JSON ({error})") from error
    header.pop("__metadata__", None)
    return iter([(key, _read_entry(name, key, entry, LENGTH_BYTES + length, size)) for key, entry in header.items()])


def _read_entry(shard: str, key: str, entry: Any, base: int, size: int) -> StoredTensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(dim) for dim in entry["shape"])
        begin, end = (int(number) for number in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(f"{shard}: its header says nothing sound of {key!r}: {entry!r:.80}") from error
    if dtype not in DTYPES:
        raise SourceError(f"{shard}: {key!r} has the dtype {dtype!r}; known are {', '.join(DTYPES)}")
    nbytes = math.prod(shape) * helper.tensor_dtype_to_np_dtype(DTYPES[dtype]).itemsize
    if begin < 0 or min((*shape, 0)) < 0 or end - begin != nbytes:
        raise SourceError(f"{shard}: {key!r} has {end - begin} bytes, but {dtype}{list(shape)} takes {nbytes}")
    if base + end > size:
        raise SourceError(f"{shard}: it ends at {size} bytes, before {key!r} does ({base + end}); it is cut off")
    return StoredTensor(shard, dtype, shape, base + begin, end - begin)


def _names_text(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


DTYPES: Final[Mapping[str, int]] = {
    "BOOL": TensorProto.BOOL, "U8": TensorProto.UINT8, "I8": TensorProto.INT8,
    "F8_E4M3": TensorProto.FLOAT8E4M3FN, "F8_E5M2": TensorProto.FLOAT8E5M2,
    "I16": TensorProto.INT16, "U16": TensorProto.UINT16, "F16": TensorProto.FLOAT16, "BF16": TensorProto.BFLOAT16,
    "I32": TensorProto.INT32, "U32": TensorProto.UINT32, "F32": TensorProto.FLOAT,
    "I64": TensorProto.INT64, "U64": TensorProto.UINT64, "F64": TensorProto.DOUBLE,
}  # fmt: skip
"""The dtypes of safetensors that ONNX has too → ONNX's. Not onnx_ir's: every run reads this file, and importing onnx_ir
loads sympy, half a second."""
