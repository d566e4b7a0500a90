"""The states of a program in a safetensors file, which is whole at every moment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from passes.weights.files import replace_when_done
from pipeline.errors import UsageError

__all__ = ["read_states", "write_states"]

FORMAT = "onnxline train states 1"

RANDOM = "random"
"""The name of the state of the random numbers; states have a dot in their names."""


def write_states(path: Path, states: Mapping[str, torch.Tensor], random: torch.Tensor | None) -> None:
    """Write under a temporary name, then rename.

    Raises:
        UsageError: the folder does not exist.
    """
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is no folder; make it before saving to {path.name}")
    tensors = {name: tensor.contiguous() for name, tensor in states.items()}
    if random is not None:
        tensors[RANDOM] = random
    with replace_when_done(path) as temporary:
        safetensors.torch.save_file(tensors, temporary, metadata={"format": FORMAT})


def read_states(
    path: Path, expected: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """The states in the file, and the state of the random numbers.

    Raises:
        UsageError: no such file, no file of this format, or other states than `expected`.
    """
    if not path.is_file():
        raise UsageError(f"there is no file {path}; expected one that save() wrote")
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except safetensors.SafetensorError as error:
        raise UsageError(f"{path} is no safetensors file ({error}); expected one that save() wrote") from error
    if metadata.get("format") != FORMAT:
        raise UsageError(f"{path} has the format {metadata.get('format')!r}; expected {FORMAT!r}, as save() writes it")
    random = tensors.pop(RANDOM, None)
    for name in sorted(tensors.keys() ^ expected.keys()):
        raise UsageError(f"{path} is of another program: {name!r} is only in one of them")
    for name, tensor in tensors.items():
        found, wanted = ((one.dtype, tuple(one.shape)) for one in (tensor, expected[name]))
        if found != wanted:
            raise UsageError(f"{path} is of another program: {name!r} is {found} there, and {wanted} here")
    return tensors, random
