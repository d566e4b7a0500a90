"""Samples as people have them: .npz, .npy and .pt files, and QNN's input lists with raw files.

What a file or a loader gives is one sample, or several: `samples_of` makes mappings input → array of it, one for each
sample. Imports torch only for a .pt file.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from passes.proof.draws import dtype_named
from passes.suggest import plural
from pipeline.errors import SourceError
from pipeline.export.source import InputSpec

Sample = Mapping[str, Any]

FOLDER_SUFFIXES: Final = (".npz", ".npy", ".pt", ".pth")
"""What a folder of samples holds: files of the first of these that there are any of."""

LISTS: Final = (".txt",)
"""QNN's input lists."""

SUFFIXES: Final = (*FOLDER_SUFFIXES, *LISTS)

EXPECTED: Final = (
    "expected files that numpy.savez, numpy.save or torch.save wrote (.npz, .npy, .pt), a folder of them, an input "
    "list of QNN's (.txt), or a loader as in file.py:load"
)


def read_file(file: Path, specs: Sequence[InputSpec], key: str) -> Iterator[tuple[str, Sample]]:
    """A label and the arrays by input for each sample of a file.

    Raises:
        SourceError: it cannot be read, or holds something else than samples for these inputs.
    """
    if file.suffix in LISTS:
        yield from _read_list(file, specs, key)
    elif file.suffix == ".npz":
        yield file.name, _read_npz(file, key)
    else:
        data = _read_npy(file, key) if file.suffix == ".npy" else _read_torch(file, key)
        try:
            found = list(samples_of(data, specs))
        except TypeError as error:
            raise SourceError(
                f"{key}: {file} holds {error}, and the model has {plural(len(specs), 'input')}; expected a mapping: "
                "input → array, a tuple in the order of the inputs, a list of these, or one tensor for one input"
            ) from error
        for index, sample in enumerate(found):
            yield (file.name if len(found) == 1 else f"{file.name}[{index}]"), sample


def samples_of(data: Any, specs: Sequence[InputSpec]) -> Iterator[Sample]:
    """The samples that `data` holds: one for a mapping; of a list or a tuple of tensors one, by the inputs in order,
    where what comes after the last input is no input, such as a label; of another list those of its items; of a tensor
    as many as its first axis has batches of the input's size.

    Raises:
        TypeError: it is something else; with the name of its type.
    """
    if isinstance(data, Mapping):
        yield data
    elif isinstance(data, list | tuple) and not all(map(_is_array, data)):
        for item in data:
            yield from samples_of(item, specs)
    elif isinstance(data, list | tuple) and len(specs) != 1:
        yield {spec.name: item for spec, item in zip(specs, data, strict=False)}
    elif isinstance(data, list | tuple) and data:
        yield from samples_of(data[0], specs)
    elif _is_array(data) and len(specs) == 1:
        yield from ({specs[0].name: part} for part in _split(data, specs[0]))
    else:
        raise TypeError(type(data).__name__)


def _is_array(item: object) -> bool:
    return hasattr(item, "shape") and hasattr(item, "dtype")


def _split(array: Any, spec: InputSpec) -> Iterator[Any]:
    """`array` as it is where it fits the input; its items where these do, or as many of them as the input's batch."""
    rank, batch = len(spec.shape), spec.shape[0] if spec.shape else 1
    if len(array.shape) == rank + 1:
        yield from array
    elif len(array.shape) == rank and isinstance(batch, int) and batch and array.shape[0] % batch == 0:
        yield from (array[start : start + batch] for start in range(0, array.shape[0], batch))
    else:
        yield array


def _read_npz(file: Path, key: str) -> Sample:
    """Read the arrays of a file by name. Pickles are refused, since they run code."""
    try:
        with file.open("rb") as opened:
            archive = np.load(opened, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise SourceError(f"{key}: {file} holds one array without a name; expected numpy.savez(file, name=…)")
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        is_archive = zipfile.is_zipfile(file)
        if is_archive and "allow_pickle" in str(error):
            raise SourceError(
                f"{key}: {file} holds Python objects, and unpickling them is refused; expected arrays of numbers"
            ) from error
        why = error if is_archive else "no zip archive"
        raise SourceError(f"{key}: {file} is no whole .npz file ({why}); write it again with numpy.savez") from error


def _read_npy(file: Path, key: str) -> np.ndarray:
    try:
        return np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise SourceError(f"{key}: {file} is no whole .npy file ({error}); write it again with numpy.save") from error


def _read_torch(file: Path, key: str) -> Any:
    """What torch.save wrote, by torch's loader that makes no objects but tensors and containers of them."""
    import torch

    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # torch raises errors of many classes for a broken file
        first = str(error).partition("\n")[0]
        raise SourceError(
            f"{key}: torch reads no tensors from {file} ({first}); expected what torch.save wrote of tensors, or of "
            "tuples or mappings of them; it is read with weights_only=True"
        ) from error


def raw_files(file: Path, key: str) -> list[dict[str, Path]]:
    """The raw files of each line of an input list, by input; an empty name where the line says none.

    A line is `INPUT:=FILE INPUT:=FILE`, or `FILE FILE` in the order of the inputs; lines that begin with # or % name
    outputs. Files are relative to the list, or to the working directory.

    Raises:
        SourceError: a file is missing, or the list cannot be read.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{key}: {file} cannot be read as a list of raw files: {error}") from error
    samples: list[dict[str, Path]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip()[0] in "#%":
            continue
        entries: dict[str, Path] = {}
        for place, word in enumerate(line.split()):
            name, named, path = word.rpartition(":=")
            found = next((option for option in (file.parent / path, Path(path)) if option.is_file()), None)
            if found is None:
                raise SourceError(
                    f"{key}: {file}, line {number}: no file {path!r}; expected raw files, as QNN lists them"
                )
            entries[name if named else str(place)] = found
        samples.append(entries)
    return samples


def _read_list(file: Path, specs: Sequence[InputSpec], key: str) -> Iterator[tuple[str, Sample]]:
    known = {spec.name: spec for spec in specs}
    for index, entries in enumerate(raw_files(file, key)):
        sample: dict[str, Any] = {}
        for name, path in entries.items():
            spec = specs[int(name)] if name.isdecimal() and int(name) < len(specs) else known.get(name)
            if spec is None:
                expected = ", ".join(known)
                raise SourceError(f"{key}: {file}: the model has no input {name!r}; expected {expected}")
            sample[spec.name] = _read_raw(path, spec, key)
        yield f"{file.name}[{index}]", sample


def _read_raw(path: Path, spec: InputSpec, key: str) -> np.ndarray:
    """The numbers of a raw file: in the dtype of the input where its size says so, else in float32, QNN's default."""
    dtype, size = np.dtype(dtype_named(spec.dtype)), path.stat().st_size
    named = [dim for dim in spec.shape if isinstance(dim, str)]
    count = math.prod(dim for dim in spec.shape if isinstance(dim, int))
    for stored in (dtype, np.dtype(np.float32)):
        if size == count * stored.itemsize or (len(named) == 1 and count and size % (count * stored.itemsize) == 0):
            shape = [-1 if isinstance(dim, str) else dim for dim in spec.shape]
            return np.fromfile(path, stored).reshape(shape).astype(dtype)
    raise SourceError(
        f"{key}: {path} has {plural(size, 'byte')}, expected those of {spec}, or as float32; one dim may be open"
    )
