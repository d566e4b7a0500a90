"""`verify.inputs`: draws of the user's own data, from files and loaders. Imports torch only if one of them does.

Samples are as people have them: .npz, .npy and .pt files, and QNN's input lists with raw files. What a file or a loader
gives is one sample, or several: `samples_of` makes mappings input → array of it, one for each sample.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from passes.proof.draws import Draw, GivenDraw, dtype_named
from passes.suggest import nearest, plural
from pipeline.config import VerifyConfig, is_reference, locate, split_factory
from pipeline.config.paths import PACKAGE, RELATIVE_TO
from pipeline.errors import SourceError
from pipeline.export.source import InputSpec, shape_text
from pipeline.export.user_code import call_user_code, load_function

KEY: Final = "verify.inputs"
"""The setting that messages name, unless a caller names another."""


@dataclass(frozen=True, slots=True)
class GivenInputs:
    """The draws of the user's own data. `notes` say what was left out."""

    draws: tuple[GivenDraw, ...] = ()
    notes: tuple[str, ...] = ()


def input_files(entries: Sequence[str], key: str = KEY) -> list[tuple[str, Path | None]]:
    """(name, file) for each entry of `verify.inputs`, folders and globs expanded and sorted; that of a loader is None.

    Raises:
        SourceError: a file is missing or holds no samples, or a glob matches nothing.
    """
    inputs: list[tuple[str, Path | None]] = []
    for entry in entries:
        if is_reference(entry):
            place, _ = split_factory(entry, key)
            if place.endswith(".py") and not Path(place).is_file():
                raise SourceError(f"{key}: no file {place!r}; {RELATIVE_TO}")
            inputs.append((entry, None))
            continue
        files = _matches(entry, key)
        wrong = next((file for file in files if file.suffix not in SUFFIXES or not file.is_file()), None)
        if wrong is not None:
            kind = "a folder" if wrong.is_dir() else "no file of samples"
            raise SourceError(f"{key}: {str(wrong)!r} is {kind}; {EXPECTED}")
        for file in files:
            if file.suffix in LISTS:
                raw_files(file, key)
        inputs += [(file.name, file) for file in files]
    return inputs


def _matches(entry: str, key: str) -> list[Path]:
    if Path(entry).is_dir():
        for suffix in FOLDER_SUFFIXES:
            if files := sorted(Path(entry).absolute().glob(f"*{suffix}")):
                return files
        raise SourceError(f"{key}: the folder {entry!r} holds no file of samples; {EXPECTED}")
    if entry.startswith(PACKAGE) or Path(entry).exists():
        return [locate(entry)]
    pattern = Path(entry).absolute()
    files = sorted(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))))
    if not files:
        what = "no file matches" if any(sign in entry for sign in "*?[") else "no file"
        raise SourceError(f"{key}: {what} {entry!r}; {RELATIVE_TO}")
    return files


def read_inputs(verify: VerifyConfig, specs: Sequence[InputSpec]) -> GivenInputs:
    """Read the first `verify.max_inputs` draws of `verify.inputs`, and check them against the inputs of the model.

    Raises:
        SourceError: a file or a loader cannot be read, or its arrays do not fit the inputs; the message lists
            all mistakes of the first such draw.
    """
    draws: list[GivenDraw] = []
    notes: list[str] = []
    samples = _samples(verify.inputs, specs, KEY, {})
    for label, arrays in islice(samples, verify.max_inputs):
        feeds = check_feeds(label, arrays, specs, KEY)
        sizes = _sizes(label, feeds, specs, KEY)
        draws.append(GivenDraw(Draw(len(draws), sizes, source=label), feeds))
    if verify.inputs and not draws:
        raise SourceError(f"{KEY}: {', '.join(verify.inputs)} gives no inputs; expected at least one draw")
    if next(samples, None) is not None:
        notes.append(f"{KEY}: only the first {verify.max_inputs} are taken (verify.max_inputs)")
    return GivenInputs(tuple(draws), tuple(notes))


def read_samples(
    entries: Sequence[str],
    specs: Sequence[InputSpec],
    key: str = KEY,
    loader_args: Mapping[str, Any] | None = None,
    targets: Sequence[str] = (),
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """A name and the arrays by input for each sample of `entries`, one at a time, checked against the inputs.

    Args:
        entries: files, folders and globs of files, and loaders (`file.py:function`).
        key: the setting that messages name.
        loader_args: what each loader is called with.
        targets: further arrays of each sample, such as a label; in a tuple they come after the inputs.

    Arrays without a number are taken, such as a cache of length 0.

    Raises:
        SourceError: as for `read_inputs`, or a sample lacks a target.
    """
    further = [name for name in targets if name not in {spec.name for spec in specs}]
    named = [*specs, *(replace(specs[0], name=name, first=None) for name in further)]
    for label, arrays in _samples(entries, named, key, loader_args or {}):
        feeds = {name: array for name, array in arrays.items() if name not in further}
        missing = [name for name in further if name not in arrays]
        if missing:
            raise SourceError(f"{key}: {label}: no array for the target {', '.join(map(repr, missing))}")
        yield (
            label,
            {
                **check_feeds(label, feeds, specs, key, may_be_empty=True),
                **{name: np.asarray(arrays[name]) for name in further},
            },
        )


def _samples(
    entries: Sequence[str], specs: Sequence[InputSpec], key: str, loader_args: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, file in input_files(entries, key):
        if file is not None:
            yield from read_file(file, specs, key)
        else:
            yield from _load_samples(name, specs, key, loader_args)


def _load_samples(
    text: str, specs: Sequence[InputSpec], key: str, loader_args: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    title = f"{key}: {text}"
    loader = load_function(text, key, title)
    samples: Any = call_user_code(lambda: loader(**loader_args), f"{title} raises", text)
    if isinstance(samples, Mapping):  # `return {...}` for one draw
        samples = [samples]
    if hasattr(samples, "get_next"):  # a CalibrationDataReader of onnxruntime
        samples = iter(samples.get_next, None)
    if not isinstance(samples, Iterable):
        raise SourceError(
            f"{title} returns {type(samples).__name__}, expected a generator, a list or a DataLoader of mappings "
            "(input → array), of tuples or of tensors, or a CalibrationDataReader of onnxruntime"
        )
    iterator, end = iter(samples), object()
    for index in count():
        sample = call_user_code(lambda: next(iterator, end), f"{title} raises", text)
        if sample is end:
            return
        name = f"{text.rpartition('/')[2]}[{index}]"
        try:
            yield from ((name, arrays) for arrays in samples_of(sample, specs))
        except TypeError as error:
            raise SourceError(
                f"{key}: {name} is {error}, expected a mapping: input → array; a tuple in the order of the inputs, or "
                "a tensor for a model with one input"
            ) from error


def check_feeds(
    label: str, arrays: Mapping[str, Any], specs: Sequence[InputSpec], key: str, *, may_be_empty: bool = False
) -> dict[str, np.ndarray]:
    """The arrays of one sample by input, as copies, after a check that they fit the inputs.

    Raises:
        SourceError: they do not; with all mistakes.
    """
    names = [spec.name for spec in specs]
    mistakes = []
    for name in arrays:
        if name not in names:
            mistakes.append(f"the model has no input {name!r}{nearest(str(name), names)}")
    arrays = {**{spec.name: spec.first for spec in specs if spec.first is not None}, **arrays}
    missing = [name for name in names if name not in arrays]
    if missing:
        mistakes.append(f"no array for {', '.join(map(repr, missing))}")
    feeds: dict[str, np.ndarray] = {}
    for spec in specs:
        if spec.name in arrays:
            array, why = _fit_array(arrays[spec.name], spec, is_configured="." in key)
            if not why and not array.size and not may_be_empty:
                why = f"is {array.dtype}{shape_text(array.shape)}, which holds no number"
            feeds[spec.name] = array
            mistakes += [f"{spec.name!r} {why}"] * bool(why)
    if mistakes:
        listing = "; ".join(map(str, specs))
        raise SourceError(f"{key}: {label}: {'; '.join(mistakes)}\n  the model's inputs are: {listing}")
    return feeds


def _fit_array(value: Any, spec: InputSpec, *, is_configured: bool) -> tuple[np.ndarray, str]:
    """A copy of `value`, since a loader may reuse its buffer, and what is wrong with it; empty where it fits."""
    if type(value).__module__.partition(".")[0] == "torch":
        import torch

        from pipeline.runtime.tensors import to_numpy

        if not isinstance(value, torch.Tensor):
            return np.zeros(0), f"is {type(value).__name__}, expected an array"
        if value.layout is not torch.strided or value.is_nested or value.is_quantized or value.is_meta:
            return np.zeros(0), "is sparse, nested, quantized or on meta, expected a dense tensor of numbers"
        value = to_numpy(value)
    if not isinstance(value, np.ndarray | np.generic):
        return np.zeros(0), f"is {type(value).__name__}, expected an array"
    array = np.array(value, order="C")
    dtype = np.dtype(dtype_named(spec.dtype))
    if array.dtype.kind == "V" and not array.dtype.fields and array.dtype.itemsize == dtype.itemsize:
        array = array.view(dtype)  # numpy.savez forgets what bfloat16 is, and keeps its bits
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    shape = shape_text(array.shape)
    fits = len(array.shape) == len(spec.shape) and all(
        isinstance(dim, str) or dim == size for dim, size in zip(spec.shape, array.shape, strict=True)
    )
    if array.dtype != dtype or not fits:
        expected = f"{spec.dtype}{shape_text(spec.shape)}"
        cast = "" if array.dtype == dtype else f": convert it with .astype({spec.dtype!r})"
        named = "" if fits or not is_configured else "; name a dim in model.inputs.*.shape to leave it open"
        return array, f"is {array.dtype}{shape}, expected {expected}{cast or named}"
    return array, ""


def _sizes(label: str, feeds: Mapping[str, np.ndarray], specs: Sequence[InputSpec], key: str) -> dict[str, int]:
    sizes: dict[str, tuple[int, str]] = {}
    for spec in specs:
        for dim, size in zip(spec.shape, feeds[spec.name].shape, strict=True):
            if not isinstance(dim, str):
                continue
            known, first = sizes.setdefault(dim, (size, spec.name))
            if known != size:
                raise SourceError(
                    f"{key}: {label}: the dim {dim!r} is {known} in {first!r} and {size} in {spec.name!r}"
                )
    return {dim: size for dim, (size, _) in sizes.items()}


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
    try:
        file.open("rb").close()  # the readers below would take a file that nobody may read for a broken one
    except OSError as error:
        raise SourceError(f"{key}: {file} cannot be read: {error.strerror}") from error
    if file.suffix in LISTS:
        yield from _read_list(file, specs, key)
    elif file.suffix == ".npz":
        yield file.name, _read_npz(file, key)
    else:
        data = _read_npy(file, key) if file.suffix == ".npy" else _read_torch(file, key)
        try:
            found = list(samples_of(data, specs))
        except TypeError as error:
            held = "an array" if isinstance(data, np.ndarray) else error
            raise SourceError(
                f"{key}: {file} holds {held}, and the model has {plural(len(specs), 'input')}; expected a mapping: "
                "input → array, a tuple in the order of the inputs, a list of these, or one tensor for one input"
            ) from error
        for index, sample in enumerate(found):
            yield (file.name if len(found) == 1 else f"{file.name}[{index}]"), sample


def samples_of(data: Any, specs: Sequence[InputSpec]) -> Iterator[Sample]:
    """The samples that `data` holds: one for a mapping, of which more than all inputs is left out, such as a label; of
    a list or a tuple of tensors one, by the inputs in order, where what comes after the last input is left out, too; of
    another list those of its items; of a tensor as many as its first axis has batches of the input's size.

    Raises:
        TypeError: it is something else; with the name of its type.
    """
    if isinstance(data, Mapping):
        names = [spec.name for spec in specs]
        yield {name: data[name] for name in names} if data.keys() >= set(names) else data
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
            if isinstance(archive, np.lib.npyio.NpzFile):
                return {name: archive[name] for name in archive.files}
    except Exception as error:  # numpy, zipfile and zlib raise errors of many classes for a broken file
        is_archive = zipfile.is_zipfile(file)
        if is_archive and "allow_pickle" in str(error):
            raise SourceError(
                f"{key}: {file} holds Python objects, and unpickling them is refused; expected arrays of numbers"
            ) from error
        why = error if is_archive else "no zip archive"
        raise SourceError(f"{key}: {file} is no whole .npz file ({why}); write it again with numpy.savez") from error
    raise SourceError(f"{key}: {file} holds one array without a name; expected numpy.savez(file, name=…)")


def _read_npy(file: Path, key: str) -> np.ndarray:
    try:
        return np.load(file, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # see above
        why = "its beginning is not numpy's, or it holds Python objects" if "pickle" in str(error) else error
        raise SourceError(f"{key}: {file} is no whole .npy file ({why}); write it again with numpy.save") from error


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
