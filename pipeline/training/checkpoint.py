"""A snapshot of a program in a safetensors file, which is whole at every moment."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from passes.weights.files import replace_when_done, write_errors
from pipeline.errors import UsageError
from pipeline.runtime.capture import RandomState, Snapshot

FORMAT = "onnxline train states 1"

DEFAULT, KERNEL = "random.default", "random.kernel."
"""The names of the states of random generators: torch's own, and those of single kernels, by number."""


def check_place(path: Path) -> None:
    """
    Raises:
        UsageError: no file can be at `path`: its folder does not exist, or the path is a folder itself.
    """
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is no folder; make it before saving to {path.name}")
    if path.is_dir():
        raise UsageError(f"{path} is a folder; expected the path of a file in it")


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write under a temporary name, then rename.

    Raises:
        UsageError: the folder does not exist, the path is a folder itself, or the disk is full.
    """
    check_place(path)
    tensors = {name: tensor.contiguous() for name, tensor in snapshot.states.items()}
    tensors |= {f"{KERNEL}{number}": state for number, state in enumerate(snapshot.random.kernels)}
    if snapshot.random.default is not None:
        tensors[DEFAULT] = snapshot.random.default
    with replace_tensors(path) as temporary:
        safetensors.torch.save_file(tensors, temporary, metadata={"format": FORMAT})


@contextmanager
def replace_tensors(path: Path) -> Iterator[Path]:
    """Yield a temporary path for safetensors to write to; the file takes the place of `path` once it is whole.

    Raises:
        UsageError: the disk is full, or nothing can be written there; what was there before is as it was.
    """
    with write_errors(path), replace_when_done(path) as temporary:
        try:
            yield temporary
        except safetensors.SafetensorError as error:  # it has the number of the system's error in its text alone
            number = SYSTEM_ERROR.search(str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def read_snapshot(path: Path, expected: Mapping[str, torch.Tensor]) -> Snapshot:
    """The snapshot in the file.

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
    default = tensors.pop(DEFAULT, None)
    numbers = sorted(int(name.removeprefix(KERNEL)) for name in tensors if name.startswith(KERNEL))
    kernels = [tensors.pop(f"{KERNEL}{number}") for number in numbers]
    for name in sorted(tensors.keys() ^ expected.keys()):
        raise UsageError(f"{path} is of another program: {name!r} is only in one of them")
    for name, tensor in tensors.items():
        found, wanted = ((item.dtype, tuple(item.shape)) for item in (tensor, expected[name]))
        if found != wanted:
            raise UsageError(f"{path} is of another program: {name!r} is {found} there, and {wanted} here")
    return Snapshot(tensors, RandomState(tuple(kernels), default))


SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")
