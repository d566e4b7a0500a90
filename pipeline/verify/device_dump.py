"""Tensors that a device has dumped, as one side of `onnxline debug compare`.

A file is named after its tensor, as it is, or with `_` for each sign that a name in C lacks, as QNN's tools write it.
Raw files hold the elements alone: their type follows from the size, and from the encoding of the tensor where they are
integers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

import numpy as np

from passes.encodings.encoding import Encoding
from passes.errors import UsageError
from passes.proof.draws import dtype_named
from passes.suggest import plural
from pipeline.errors import Unsupported
from pipeline.ir import Value
from pipeline.verify.backends import Backend, Feeds, RunnableModel, Shapes, shapes_of

Layout = Literal["nchw", "nhwc"]

Integers = Literal["signed", "unsigned"]
"""How raw files hold a symmetric format: around 0, or counted from its lowest integer."""

SUFFIXES: Final = (".npy", ".raw", ".bin")

NATIVE: Final = "_native"
"""What QNN's tools append to the name of a tensor in the integers of the device."""


class DeviceDump(Backend):
    """A folder of tensors in place of a backend: each value that has a file.

    Args:
        folder: holds .npy, .raw and .bin files, also in folders below.
        encodings: of tensors that were dumped as integers.
        layout: the axes of raw files, and of .npy files where both layouts have one shape; None takes nchw.
        integers: of raw files of symmetric formats; None refuses these, unless their scale has another zero point than
            the middle, which counts from the lowest integer.

    Raises:
        UsageError: the folder holds no such file.
    """

    def __init__(
        self,
        model: RunnableModel,
        folder: Path,
        encodings: Mapping[str, Encoding],
        layout: Layout | None = None,
        integers: Integers | None = None,
    ) -> None:
        super().__init__(model)
        self._encodings, self._layout, self._folder = encodings, layout, folder
        self._integers: Integers | None = integers
        paths = [path for path in sorted(folder.rglob("*")) if path.suffix in SUFFIXES]
        # by the name of the file, and by its path, which some tools make of the slashes in the name of a tensor
        inner = {re.sub(r"\W", "_", str(path.relative_to(folder).with_suffix(""))): path for path in paths}
        self._files = inner | {path.stem.removesuffix(NATIVE): path for path in paths}
        if not self._files:
            raise UsageError(
                f"{folder}: found no file of a tensor; expected {', '.join(SUFFIXES)}, named after tensors"
            )

    def run(self, feeds: Feeds) -> dict[str, np.ndarray]:
        raise Unsupported(f"{self._folder} holds tensors of a run on a device, and runs nothing")

    def value_names(self, shapes: Shapes) -> tuple[str, ...]:
        return tuple(value.name for value, _ in self._find(shapes))

    def walk(self, feeds: Feeds, wanted: Collection[str]) -> Iterator[tuple[str, np.ndarray]]:
        for value, path in self._find(shapes_of(feeds)):
            if value.name in wanted:
                yield value.name, self._read(path, value)

    def find_unmatched(self, shapes: Shapes) -> tuple[str, ...]:
        """The files that no computed value has the name of."""
        found = {path for _, path in self._find(shapes)}
        return tuple(
            str(path.relative_to(self._folder)) for path in dict.fromkeys(self._files.values()) if path not in found
        )

    def find_ambiguous(self, shapes: Shapes) -> tuple[str, ...]:
        """The .npy files whose shape is that of both layouts, and raw images; none where the layout was given."""
        if self._layout is not None:
            return ()
        return tuple(
            str(path.relative_to(self._folder))
            for value, path in self._find(shapes)
            if _is_ambiguous(_shape_of(value), has_shape=path.suffix == ".npy")
        )

    def _find(self, shapes: Shapes) -> list[tuple[Value, Path]]:
        graph = self._model.graph_for(shapes)
        made = [graph.values[vid] for op in graph.ops for vid in op.outputs]
        return [(value, path) for value in made if (path := self._file_of(value.name)) is not None]

    def _file_of(self, name: str) -> Path | None:
        plain = re.sub(r"\W", "_", name)
        return next(
            (self._files[stem] for stem in (name, plain, f"_{plain}", plain.lstrip("_")) if stem in self._files), None
        )

    def _read(self, path: Path, value: Value) -> np.ndarray:
        shape = _shape_of(value)
        encoding = self._encodings.get(value.name)
        wanted = np.dtype(dtype_named(value.spec.dtype))
        if path.suffix == ".npy":
            try:
                array = np.load(path, allow_pickle=False)
            except (ValueError, OSError, EOFError) as error:
                raise UsageError(
                    f"{path}: found no array of numbers, expected one as numpy.save writes: {error}"
                ) from error
        else:
            array = np.fromfile(path, _stored_type(path, math.prod(shape), wanted, encoding, self._integers))
        if array.size != math.prod(shape):
            raise UsageError(
                f"{path}: found {plural(array.size, 'element')}, and {value.name!r} has {list(shape)}; "
                "dump it for these inputs"
            )
        array = self._lay_out(array, shape)
        if wanted.kind == "f" and array.dtype.kind in "iu":
            array = _dequantize(path, array, encoding)
        return array.astype(wanted)

    def _lay_out(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """`array` in the axes of the model: the channels, which are last on many devices, come second."""
        last = _channels_last(shape)
        is_first, is_last = (_without_ones(array.shape) == _without_ones(sizes) for sizes in (shape, last))
        if array.ndim == 1 or is_first == is_last:
            is_last = self._layout == "nhwc"
        return np.moveaxis(array.reshape(last), -1, 1) if is_last and len(shape) > 2 else array.reshape(shape)


def _shape_of(value: Value) -> tuple[int, ...]:
    return tuple(size for size in value.spec.shape if isinstance(size, int))  # the graph is one of these inputs


def _channels_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], *shape[2:], shape[1]) if len(shape) > 2 else shape


def _is_ambiguous(shape: tuple[int, ...], *, has_shape: bool) -> bool:
    """Whether a file of this shape does not say in which layout it is; one without a shape never does."""
    if has_shape:
        return len(_without_ones(shape)) > 1 and _without_ones(shape) == _without_ones(_channels_last(shape))
    return len(shape) > 3 and shape[1] > 1 and math.prod(shape[2:]) > 1


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _stored_type(
    path: Path, count: int, wanted: np.dtype, encoding: Encoding | None, integers: Integers | None
) -> np.dtype:
    size = path.stat().st_size
    if size == count * wanted.itemsize:
        return wanted
    if size == count * 4:
        return np.dtype(np.float32)
    if encoding is not None and size in (count, 2 * count):
        return np.dtype(f"{'i' if _is_signed(path, encoding, integers) else 'u'}{size // count}")
    if size == count * 2:
        return np.dtype(np.float16)
    raise UsageError(
        f"{path}: found {plural(size, 'byte')} for {plural(count, 'element')}, expected 4 or 2 for each, or with "
        "--encodings those of integers"
    )


def _is_signed(path: Path, encoding: Encoding, integers: Integers | None) -> bool:
    precision = encoding.precision
    if not precision.signed or encoding.zero_point.any():
        return precision.signed and not precision.symmetric  # a symmetric one with an offset of 0 has nothing below 0
    if integers is None:
        raise UsageError(
            f"{path}: found integers of the symmetric format {precision}, which the encodings do not say the "
            "sign of; say with --integers signed that they lie around 0, or with --integers unsigned that they count "
            f"from {precision.lowest - 1}"
        )
    return integers == "signed"


def _dequantize(path: Path, array: np.ndarray, encoding: Encoding | None) -> np.ndarray:
    if encoding is None:
        raise UsageError(
            f"{path}: found {array.dtype}, and the tensor is one of floats; give its scale with --encodings FILE"
        )
    numbers = array.astype(np.int64)
    if encoding.precision.signed and array.dtype.kind == "u":  # AIMET's files count from the lowest integer
        numbers -= 2 ** (encoding.precision.bits - 1)
    scale, zero = (encoding.spread(array, values) for values in (encoding.scale, encoding.zero_point))
    return ((numbers - zero) * scale.astype(np.float64)).astype(np.float32)
