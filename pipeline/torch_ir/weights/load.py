"""Weights from files, and whether they are those of an IR."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from pipeline.errors import SourceError
from pipeline.export.checkpoint import read_checkpoint, read_pickle, read_safetensors
from pipeline.torch_ir.errors import NoWeightFile, WeightLoadError
from pipeline.torch_ir.ir import IR, an_ir
from pipeline.torch_ir.validation import by_name, path_of
from pipeline.torch_ir.weights.binding import bind_stored

__all__ = ["load_weights", "load_weights_pt", "load_weights_safetensors", "validate_weights_against_ir"]

State = dict[str, torch.Tensor]


def load_weights(path: str | Path) -> State:
    """Name → tensor, of a .pt, .pth, .bin or .safetensors, an .index.json of shards, or a folder with one of these.

    A file of `torch.save` may have any other name too, as `last.ckpt`. Nothing but tensors is unpickled.

    Raises:
        NoWeightFile: there is no such file (a FileNotFoundError too).
        WeightLoadError: it is broken, or it holds something else than tensors.
    """
    return _loaded(path, read_checkpoint)


def load_weights_pt(path: str | Path) -> State:
    """Name → tensor, of a file of `torch.save`, whatever it is called. Nothing but tensors is unpickled.

    Raises:
        WeightLoadError: it cannot be read, or holds something else than tensors.
    """
    return _loaded(path, read_pickle)


def load_weights_safetensors(path: str | Path) -> State:
    """Name → tensor, of a safetensors file, whatever it is called.

    Raises:
        WeightLoadError: it cannot be read.
    """
    return _loaded(path, read_safetensors)


def validate_weights_against_ir(weights: Mapping[str, torch.Tensor], ir: IR) -> list[str]:
    """What hinders `weights` from being those of `ir`: tensors that are absent, or of another shape or dtype.

    Empty where they fit. Constants that the IR holds itself need not be among them; what the IR does not use may be.
    """
    weights = by_name("weights", weights, WeightLoadError)
    return bind_stored(an_ir(ir, WeightLoadError), weights, {}).problems


def _loaded(path: str | Path, read: Callable[[Path], State]) -> State:
    path = path_of("weights", path, WeightLoadError)
    if not path.exists():
        raise NoWeightFile(f"Weight file not found: {path}; expected .pt, .pth, .bin or .safetensors")
    try:
        return read(path)
    except SourceError as error:
        said = str(error).removeprefix(f"checkpoint {path}: ")
        raise WeightLoadError(f"Failed to load weights from {path}: {said}") from error
