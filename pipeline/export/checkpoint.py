"""Weights from local files: safetensors, a folder with or without shards, or a pickle that holds tensors only.

A shard begins with 8 bytes, the length of its header. Then comes the header, JSON that maps the name of a tensor to
dtype, shape and `data_offsets`, which count from the end of the header; then the data. So the headers alone say where
each tensor is stored, and no weight is read.

A module is also made without any: parameters have shape and dtype but no memory, buffers are computed.
`torch.device("meta")` alone would lose what a constructor computes, such as the frequencies of rotary embeddings, which
no checkpoint holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import safetensors
import safetensors.torch
import torch
from onnx import TensorProto, helper
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from passes.suggest import join_first, plural
from pipeline.errors import SourceError

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
LENGTH_BYTES: Final = 8
LONGEST_HEADER: Final = 100_000_000
"""The limit of the safetensors library."""
SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`nbytes` bytes of the file `shard` at `offset`, row-major and little-endian. `dtype` is spelled `BF16`."""

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
        mistakes.append(f"{INDEX}: it names tensors that are in no shard: {join_first(lost, SHOWN)}")
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


DTYPES: Final[Mapping[str, int]] = {
    "BOOL": TensorProto.BOOL, "U8": TensorProto.UINT8, "I8": TensorProto.INT8,
    "F8_E4M3": TensorProto.FLOAT8E4M3FN, "F8_E5M2": TensorProto.FLOAT8E5M2,
    "I16": TensorProto.INT16, "U16": TensorProto.UINT16, "F16": TensorProto.FLOAT16, "BF16": TensorProto.BFLOAT16,
    "I32": TensorProto.INT32, "U32": TensorProto.UINT32, "F32": TensorProto.FLOAT,
    "I64": TensorProto.INT64, "U64": TensorProto.UINT64, "F64": TensorProto.DOUBLE,
}  # fmt: skip
"""The dtypes of safetensors that ONNX has too → ONNX's. Not onnx_ir's: every run reads this file, and importing onnx_ir
loads sympy, half a second."""


PICKLES = (".pt", ".pth", ".bin")
# In a folder, the first of these that exists is read.
NAMES = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin")


ShardReader = Callable[[Path], dict[str, Any]]
"""Reads one safetensors file: its tensors by name."""


def read_checkpoint(path: Path, read: ShardReader | None = None) -> dict[str, Any]:
    """Read all tensors of a checkpoint, by name.

    Args:
        read: reads one safetensors file; `read_safetensors` by default.

    Raises:
        SourceError: there is no checkpoint, it is broken, or it holds something else than tensors.
    """
    if path.is_dir():
        return _read_folder(path, read)
    if path.name.endswith(".index.json"):
        return _read_shards(path, read)
    if path.suffix == ".safetensors":
        return (read or read_safetensors)(path)
    if path.suffix in PICKLES:
        return read_pickle(path)
    if path.is_file() and (zipfile.is_zipfile(path) or _begins_as_pickle(path)):
        return read_pickle(path)  # Lightning's .ckpt, or no ending at all
    raise SourceError(f"checkpoint {path}: expected a folder, .safetensors, {', '.join(PICKLES)} or .index.json")


def _read_folder(folder: Path, read: ShardReader | None) -> dict[str, Any]:
    for name in NAMES:
        if (folder / name).is_file():
            return read_checkpoint(folder / name, read)
    files = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    raise SourceError(f"checkpoint {folder}: expected one of {', '.join(NAMES)}; found {files}")


def _read_shards(index: Path, read: ShardReader | None) -> dict[str, Any]:
    places = read_index(index)
    state: dict[str, Any] = {}
    for shard in sorted(set(places.values())):
        state.update(read_checkpoint(_shard(index, shard), read))
    missing = [name for name in places if name not in state]
    if missing:
        raise SourceError(f"checkpoint {index}: {missing[0]!r} is in no shard; the index names {places[missing[0]]}")
    return state


def _shard(index: Path, name: str) -> Path:
    path = index.parent / name
    if path.is_dir() or name.endswith(".index.json"):
        raise SourceError(f"checkpoint {index}: the shard {name!r} is no file of weights; expected plain file names")
    if not path.is_file():
        raise SourceError(f"checkpoint {index}: the shard {name!r} is missing; fetch the rest of the checkpoint")
    return path


def open_safetensors(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file, each of which is read where transformers takes `tensor[...]`.

    They are read and not mapped: pages of a mapped file stay in memory until all of its tensors are gone.

    Raises:
        SourceError: it is no whole file.
    """
    try:
        file = safetensors.safe_open(path, framework="pt", backend="pread")
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise SourceError(f"checkpoint {path}: not a whole safetensors file: {error}") from error
    names = file.keys()
    return {name: file.get_slice(name) for name in names}


def float_dtype_of(state: Mapping[str, Any]) -> torch.dtype:
    """The dtype of the first floats in a checkpoint; float32 where it has none.

    Args:
        state: by name, tensors or what `open_safetensors` gives.
    """
    for value in state.values():
        dtype = value.dtype if isinstance(value, torch.Tensor) else FLOATS.get(value.get_dtype())
        if dtype is not None and dtype in FLOATS.values():
            return dtype
    return torch.float32


FLOATS: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
"""Names of safetensors → torch's dtypes, of those in which a model computes."""


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of one safetensors file.

    Raises:
        SourceError: it cannot be read.
    """
    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise SourceError(f"checkpoint {path}: not a whole safetensors file: {error}") from error


def read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """Read one file of `torch.save`, memory-mapped where its format allows it; the key `state_dict` is unwrapped.

    Raises:
        SourceError: it cannot be read, or holds something else than tensors.
    """
    try:
        # Mapped: unread tensors are never loaded. Files of torch before 1.6 are no archives and cannot be mapped.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        if not zipfile.is_zipfile(path) and not _begins_as_pickle(path):
            raise SourceError(f"checkpoint {path}: no file of torch.save: it is neither archive nor pickle") from error
        raise SourceError(
            f"checkpoint {path}: it holds more than tensors, and running its code is refused "
            "(torch.load with weights_only=True); save module.state_dict() or a safetensors file"
        ) from error
    except Exception as error:  # torch's two readers raise many types on an empty file, a text, half a file
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise SourceError(f"checkpoint {path}: no whole file of torch.save: {said}") from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(map(_is_named_tensor, state.items())):
        raise SourceError(f"checkpoint {path}: found {_describe(state)}, expected a mapping of name to tensor")
    return state


def _is_named_tensor(entry: tuple[object, object]) -> bool:
    return isinstance(entry[0], str) and isinstance(entry[1], torch.Tensor)


def _describe(state: Any) -> str:
    if not isinstance(state, dict):
        return type(state).__name__
    name, value = next(entry for entry in state.items() if not _is_named_tensor(entry))
    return f"a mapping with {type(value).__name__} at {name!r}"


def _begins_as_pickle(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1) == b"\x80"  # the protocol, which every writer since Python 2.3 puts first


LARGE: Final = 2**24
"""Elements from which a tensor is not even allocated: a system may refuse the memory, though it would stay unused."""


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Put every `nn.Parameter` that a module registers in this block on the meta device; tied ones stay tied.

    Large tensors are made there to begin with. A large buffer therefore has no value afterwards.
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = type(parameter)(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        with _LargeOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class _LargeOnMeta(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FACTORIES and kwargs.get("device") is None and _elements(args, kwargs) >= LARGE:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _elements(args: Any, kwargs: Any) -> int:
    size = kwargs.get("size", args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args)
    dims = size if isinstance(size, list | tuple) else (size,)
    return math.prod(dim for dim in dims if isinstance(dim, int))


def is_weightless(module: nn.Module) -> bool:
    """Whether a parameter has no memory."""
    return any(parameter.is_meta for parameter in module.parameters())


def take_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the values of the module's buffers, and replace its buffers by ones on meta: a trace needs one device.

    Buffers that have no value are left out.
    """
    values = {name: buffer for name, buffer in module.named_buffers(remove_duplicate=False) if not buffer.is_meta}
    empty = {id(buffer): buffer.to("meta") for buffer in values.values()}
    for inner in module.modules():
        own = inner.named_buffers(recurse=False)
        inner._buffers.update({name: empty.get(id(buffer), buffer) for name, buffer in own})
    return values


@contextlib.contextmanager
def without_values(module: nn.Module) -> Iterator[None]:
    """Let calls of a module without weights give results without values; of another module nothing changes."""
    if not is_weightless(module):
        yield
        return
    values = take_buffers(module)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        for name, value in values.items():
            place, _, leaf = name.rpartition(".")
            module.get_submodule(place)._buffers[leaf] = value


FACTORIES: Final = frozenset({torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn})
"""Functions by which constructors make parameters."""
