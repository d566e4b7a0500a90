"""Named tensors in a file: .npz or .safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from passes.model.files import replace_when_done
from pipeline.errors import UserMistake
from pipeline.export.arrays import VIEWS, to_numpy, to_torch

__all__ = ["read_arrays", "write_arrays"]

ENDINGS = ".npz or .safetensors"


def read_arrays(path: Path) -> dict[str, torch.Tensor]:
    """Name → tensor. Nothing is unpickled.

    Raises:
        UserMistake: there is no such file, or it is none of the two.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return {name: to_torch(archive[name]) for name in archive.files}
    except Exception as error:  # of the two libraries, or the file system's
        raise UserMistake(f"{path} cannot be read: {error}") from error
    raise UserMistake(f"{path}: expected {ENDINGS}")


def write_arrays(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write `tensors`, at once.

    Raises:
        UserMistake: another ending, a dtype that .npz has not, or a place that cannot be written.
    """
    foreign = [name for name, tensor in tensors.items() if tensor.dtype in VIEWS]
    if path.suffix == ".npz" and foreign:
        raise UserMistake(
            f"{path}: numpy has no {str(tensors[foreign[0]].dtype)[6:]} ({foreign[0]!r}); use .safetensors"
        )
    if path.suffix not in (".npz", ".safetensors"):
        raise UserMistake(f"{path}: expected {ENDINGS}")
    try:
        with replace_when_done(path) as temporary:
            if path.suffix == ".npz":
                with temporary.open("wb") as file:
                    np.savez(file, **{name: to_numpy(tensor) for name, tensor in tensors.items()})  # type: ignore[arg-type]
            else:
                from safetensors.torch import save_file

                save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, temporary)
    except OSError as error:
        raise UserMistake(f"{path} cannot be written: {error.strerror or error}") from error
