"""Weights from local files: safetensors, a folder with or without shards, or a pickle that holds tensors only."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from pipeline.errors import SourceError
from pipeline.export.shards import read_index

PICKLES = (".pt", ".pth", ".bin")
# In a folder, the first of these that exists is read.
NAMES = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin")


def read_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint, by name.

    Raises:
        SourceError: there is no checkpoint, it is broken, or it holds something else than tensors.
    """
    if path.is_dir():
        return _read_folder(path)
    if path.name.endswith(".index.json"):
        return _read_shards(path)
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    if path.suffix in PICKLES:
        return read_pickle(path)
    if path.is_file() and (zipfile.is_zipfile(path) or _begins_as_pickle(path)):
        return read_pickle(path)  # Lightning's .ckpt, or no ending at all
    raise SourceError(f"checkpoint {path}: expected a folder, .safetensors, {', '.join(PICKLES)} or .index.json")


def _read_folder(folder: Path) -> dict[str, torch.Tensor]:
    for name in NAMES:
        if (folder / name).is_file():
            return read_checkpoint(folder / name)
    files = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    raise SourceError(f"checkpoint {folder}: expected one of {', '.join(NAMES)}; found {files}")


def _read_shards(index: Path) -> dict[str, torch.Tensor]:
    places = read_index(index)
    state: dict[str, torch.Tensor] = {}
    for shard in sorted(set(places.values())):
        state.update(read_checkpoint(_shard(index, shard)))
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
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise SourceError(f"checkpoint {path}: found {_describe(state)}, expected a mapping of name to tensor")
    return state


def _describe(state: Any) -> str:
    if not isinstance(state, dict):
        return type(state).__name__
    name, value = next((name, value) for name, value in state.items() if not isinstance(value, torch.Tensor))
    return f"a mapping with {type(value).__name__} at {name!r}"


def _begins_as_pickle(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1) == b"\x80"  # the protocol, which every writer since Python 2.3 puts first
