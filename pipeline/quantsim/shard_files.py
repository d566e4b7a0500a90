"""The job of one shard: its weights, rounded to the nearest in slices of channels, proven, and written to a file.

Every element of a rounded weight is proven: torch dequantizes what is written by its own means.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np
from onnx import TensorProto, numpy_helper

from passes.encodings.encoding import Encoding, Precision
from passes.weights.detached import DetachedModel, read_model
from passes.weights.files import replace_when_done
from pipeline.errors import CheckFailed, UsageError
from pipeline.quantsim.encodings import encode_weight, quantize
from pipeline.quantsim.stored_constants import store_constants

if TYPE_CHECKING:
    import torch

SLICE: Final = 2**22
"""Elements that are rounded and proven at once."""

ALIGNMENT: Final = 4096

HALF_STEP: Final = 0.502
"""Half a step, and what a scale of 16 bits and the clipping of the outermost value may add."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How one weight is stored; `axis` is that of its channels or blocks."""

    name: str
    bits: int
    signed: bool
    symmetric: bool
    block: int
    axis: int
    channel_axis: int

    @property
    def precision(self) -> Precision:
        granularity = "block" if self.block else "channel"
        return Precision(self.bits, self.signed, self.symmetric, granularity, self.block)


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """A weight as it is stored: integers, scales in the type of the weight, and zero points of the scales' shape."""

    integers: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray

    def select(self, form: WeightFormat, first: int, last: int) -> RoundedWeight:
        """The output channels `first` to `last`."""
        place = index_channels(self.integers.ndim, form.channel_axis, first, last)
        own = place if form.block else (slice(first, last),)
        return RoundedWeight(self.integers[place], self.scales[own], self.zero_points[own])


def index_channels(rank: int, axis: int, first: int, last: int) -> tuple[slice, ...]:
    """What selects the channels `first` to `last` of an array."""
    return tuple(slice(first, last) if place == axis else slice(None) for place in range(rank))


def split_channels(shape: Sequence[int], axis: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of channels, of at most `most` elements each where one channel has no more."""
    count = shape[axis]
    step = max(1, most * count // max(math.prod(shape), 1))
    return ((first, min(first + step, count)) for first in range(0, count, step))


class ShardFile:
    """Writes tensors to the file of a shard; `places` says where each of them lies."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self.places: list[dict[str, Any]] = []

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[ShardFile]:
        with replace_when_done(path) as temporary, temporary.open("wb") as out:
            yield cls(out)

    def write(self, name: str, kind: str, array: np.ndarray, data_type: int, dims: Sequence[int]) -> None:
        self._out.write(b"\0" * (-self._out.tell() % ALIGNMENT))
        place = {"name": name, "kind": kind, "type": data_type, "dims": [*dims], "offset": self._out.tell()}
        self._out.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self.places.append({**place, "length": self._out.tell() - place["offset"]})

    def write_rounded(self, form: WeightFormat, found: RoundedWeight, data_type: int) -> None:
        """A weight of the type `data_type` as integers, scales, and zero points where its format has any."""
        precision = form.precision
        kind = TensorProto.DataType.Value(precision.onnx_name)
        self.write(form.name, "quantized", pack(found.integers, precision), kind, found.integers.shape)
        self.write(form.name, "scale", found.scales, data_type, found.scales.shape)
        if not precision.symmetric or not precision.signed:
            self.write(form.name, "zero_point", pack(found.zero_points, precision), kind, found.scales.shape)


def open_source(path: str) -> DetachedModel:
    """The model of a job: its weights stay in their files, and its Constants are stored tensors."""
    return store_constants(read_model(Path(path), unread=True))


def quantize_shard(path: str, names: Sequence[str], formats: Sequence[Mapping[str, Any]], file: str) -> dict[str, Any]:
    """Write the tensors `names` of the model `path` to `file`, those that have a format in that format.

    Returns:
        The places of all tensors in the file, and the ratio of signal to noise of each weight, in dB.
    """
    model = open_source(path)
    known = {str(entry["name"]): WeightFormat(**entry) for entry in formats}
    ratios: dict[str, float] = {}
    with ShardFile.open(Path(file)) as out:
        for name in names:
            tensor = model.index.initializers[name]
            array = model.array(tensor)
            if name not in known:
                out.write(name, "", array, tensor.data_type, tensor.dims)
                continue
            found, ratios[name] = round_to_nearest(array, known[name])
            out.write_rounded(known[name], found, tensor.data_type)
    return {"file": file, "nbytes": Path(file).stat().st_size, "places": out.places, "ratios": ratios}


def pack(array: np.ndarray, precision: Precision) -> np.ndarray:
    """Integers as ONNX stores them: two of 4 bits in a byte, the first one low."""
    if precision.stored_bits != 4:
        return array
    flat = np.append(array.reshape(-1), np.zeros(array.size % 2, array.dtype)).view(np.uint8)
    return (flat[::2] & 15) | (flat[1::2] << 4)


def round_to_nearest(array: np.ndarray, form: WeightFormat) -> tuple[RoundedWeight, float]:
    """The weight in its format, each element proven by torch, and its ratio of signal to noise in dB.

    Raises:
        UsageError: the weight holds infinity or NaN.
        CheckFailed: torch finds an element off by more than half a step.
    """
    precision, channel = form.precision, form.channel_axis
    dtype = dtype_of(precision)
    integers = np.empty(array.shape, dtype)
    scales, zeros = [], []
    signal = noise = 0.0
    for first, last in split_channels(array.shape, channel, SLICE):
        place = index_channels(array.ndim, channel, first, last)
        part = array[place].astype(np.float32)
        if not np.isfinite(part).all():
            raise UsageError(f"the stored tensor {form.name!r} holds infinity or NaN, which has no scale")
        found = encode_weight(part, precision, form.axis)
        rounded = found.scale.astype(array.dtype)  # the scale that is stored decides the integers; none is smaller
        short = rounded.astype(np.float32) < found.scale
        rounded[short] = np.nextafter(rounded[short], np.asarray(np.inf, array.dtype))
        integers[place] = quantize(part, Encoding(precision, rounded.astype(np.float32), found.zero_point, form.axis))
        scales.append(rounded)
        zeros.append(found.zero_point.astype(dtype))
        sums = _prove(part, RoundedWeight(integers[place], rounded, zeros[-1]), form)
        signal, noise = signal + sums[0], noise + sums[1]
    along = channel if form.block else 0
    ratio = 10 * math.log10(signal / noise) if signal and noise else math.inf
    return RoundedWeight(integers, np.concatenate(scales, along), np.concatenate(zeros, along)), ratio


def _prove(part: np.ndarray, found: RoundedWeight, form: WeightFormat) -> tuple[float, float]:
    """Hold every element of some channels against torch; returns the sums of squares of elements and differences.

    Raises:
        CheckFailed: an element is off by more than half a step.
    """
    import torch

    from pipeline.runtime.tensors import as_tensor  # torch takes seconds to import

    weight = as_tensor(part)
    dequantized, steps = dequantize(found, form)
    difference = dequantized.sub_(weight)
    noise, signal = (
        torch.linalg.vector_norm(values, dtype=torch.float64).item() ** 2 for values in (difference, weight)
    )
    excess = difference.abs_().sub_(steps, alpha=HALF_STEP).max().item()
    if excess > 0:
        raise CheckFailed(f"{form.name}: torch finds it {excess:.3g} further off than half a step; report it as a bug")
    return signal, noise


def dequantize(found: RoundedWeight, form: WeightFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight by torch from the bytes that are written, in float32, and the step of each element."""
    from pipeline.runtime.tensors import as_tensor

    numbers, middle = (_unpack(array, form.precision) for array in (found.integers, found.zero_points))
    steps = as_tensor(found.scales).float()
    if form.block:
        size = numbers.shape[form.axis]
        steps, middle = (
            part.repeat_interleave(form.block, form.axis).narrow(form.axis, 0, size) for part in (steps, middle)
        )
    else:
        shape = [-1 if axis == form.axis else 1 for axis in range(numbers.ndim)]
        steps, middle = steps.reshape(shape), middle.reshape(shape)
    return numbers.sub_(middle).mul_(steps), steps


def read_dequantized(form: WeightFormat, places: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """The floats for which a written weight stands, in float32.

    Args:
        places: of its integers, scales and zero points, as `ShardFile.places`, each with its `file`.
    """
    parts: dict[str, np.ndarray] = {}
    for place in places:
        with Path(place["file"]).open("rb") as file:
            file.seek(place["offset"])
            data = file.read(place["length"])
        parts[place["kind"]] = numpy_helper.to_array(
            TensorProto(data_type=place["type"], dims=place["dims"], raw_data=data)
        )
    dtype, scales = dtype_of(form.precision), parts["scale"]
    zeros = parts["zero_point"].astype(dtype) if "zero_point" in parts else np.zeros(scales.shape, dtype)
    return dequantize(RoundedWeight(parts["quantized"].astype(dtype), scales, zeros), form)[0].numpy()


def dtype_of(precision: Precision) -> np.dtype:
    """The dtype of integers in memory, whole bytes each."""
    return np.dtype(f"{'i' if precision.signed else 'u'}{max(precision.stored_bits, 8) // 8}")


def _unpack(array: np.ndarray, precision: Precision) -> torch.Tensor:
    """The integers of `pack` by torch, as float32."""
    import torch

    from pipeline.runtime.tensors import as_tensor

    packed = as_tensor(pack(array, precision))
    if precision.stored_bits != 4:
        return packed.to(torch.float32).reshape(array.shape)
    nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten()[: array.size].reshape(array.shape).to(torch.float32)
    return torch.where(nibbles > 7, nibbles - 16, nibbles) if precision.signed else nibbles
