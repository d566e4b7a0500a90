"""The encoding of a stored tensor that a pass made of others by moving their numbers (turned, reshaped, cut or joined),
or by multiplying each channel by a factor, as a BatchNormalization is folded.

What was done is read from the numbers themselves, so it holds for any pass that does it: bit by bit for what moves, and
up to rounding for what is multiplied. Where the numbers are others, there is no rule, and the tensor is stale.

Where the slices along one axis are those of another tensor, each multiplied by a factor, and have scales of their own,
the factor goes into these, and the integers stay as they are. With one scale for all slices they cannot: then there is
no such encoding, and the reason says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import Any, Final

import numpy as np

from passes.encodings.encoding import Encoding, NoEncoding, is_same_encoding

CHANGED: Final = "its numbers are changed"

MOST_AXES: Final = 5
"""The rank up to which orders of axes are tried."""


@dataclass(frozen=True, slots=True)
class EncodedArray:
    """A stored tensor of the source with its encoding."""

    name: str
    array: np.ndarray
    encoding: Encoding


def derive_encoding(array: np.ndarray, sources: Sequence[EncodedArray]) -> tuple[Encoding, tuple[str, ...]]:
    """The encoding that quantizes `array` to the same integers as its sources, and the names of those sources.

    Raises:
        NoEncoding: `array` does not have the numbers of the sources, or no encoding of the same format does that.
    """
    why: list[str] = []
    for source in sources:
        for turned in _turn(source):
            found = _reshape(turned, array) or _encoding_of_slices(turned, array, why)
            if found is not None:
                return found, (source.name,)
    joined = _join(array, sources, why) if len(sources) > 1 else None
    if joined is not None:
        return joined
    for source in sources:
        for turned in _turn(source):
            try:
                scaled = scale_encoding(turned.array, turned.encoding, array)
            except NoEncoding as error:
                why.append(str(error))
                continue
            if scaled is not None:
                return scaled, (source.name,)
    raise NoEncoding(why[0] if why else CHANGED)


def _turn(source: EncodedArray) -> Iterator[EncodedArray]:
    """The tensor with its axes in each order; the axis of an encoding goes along."""
    rank = source.array.ndim
    orders = permutations(range(rank)) if rank <= MOST_AXES else [tuple(range(rank))]
    for order in orders:
        encoding = source.encoding
        if encoding.axis is not None:
            encoding = replace(encoding, axis=order.index(encoding.axis))
        if encoding.precision.granularity == "block":
            encoding = encoding.with_arrays(partial(np.transpose, axes=order))
        yield EncodedArray(source.name, source.array.transpose(order), encoding)


def _reshape(source: EncodedArray, array: np.ndarray) -> Encoding | None:
    """The encoding of `array` if it is the source in another shape."""
    if source.array.size != array.size or not np.array_equal(source.array.reshape(array.shape), array):
        return None
    encoding, axis = source.encoding, source.encoding.axis
    if axis is None or source.array.shape == array.shape:
        return encoding
    found = _same_axis(source.array.shape, array.shape, axis)
    if found is None:
        raise NoEncoding(f"its channels, axis {axis} of {source.name!r}, are no axis of it any more")
    if encoding.precision.granularity == "block":
        shape = tuple(size if at != found else encoding.scale.shape[axis] for at, size in enumerate(array.shape))
        encoding = encoding.with_arrays(lambda values: values.reshape(shape))
    return replace(encoding, axis=found)


def _same_axis(shape: tuple[int, ...], other: tuple[int, ...], axis: int) -> int | None:
    """The axis of the shape `other` along which numbers lie as along `axis` of `shape`."""
    place = math.prod(shape[:axis])
    wanted = (place, shape[axis])
    return next((at for at in range(len(other)) if (math.prod(other[:at]), other[at]) == wanted), None)


def _encoding_of_slices(source: EncodedArray, array: np.ndarray, why: list[str]) -> Encoding | None:
    """The encoding of `array` if it is some slices of the source along one axis."""
    axis = _cut_axis(source.array.shape, array.shape)
    if axis is None:
        return None
    slices = _find_slices(source.array, array, axis)
    if slices is None:
        return None
    try:
        return _take(source.encoding, slices, axis)
    except NoEncoding as error:
        why.append(str(error))
        return None


def _cut_axis(shape: tuple[int, ...], part: tuple[int, ...]) -> int | None:
    """The only axis along which `part` is shorter."""
    if len(shape) != len(part):
        return None
    axes = [at for at, (size, cut_size) in enumerate(zip(shape, part, strict=True)) if size != cut_size]
    return axes[0] if len(axes) == 1 and part[axes[0]] < shape[axes[0]] else None


def _find_slices(whole: np.ndarray, part: np.ndarray, axis: int) -> list[int] | None:
    """For each slice of `part` along `axis`, its index in `whole`; neighbours where equal slices leave a choice."""
    rows, wanted = (np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1) for array in (whole, part))
    places: dict[bytes, list[int]] = {}
    for at, row in enumerate(rows):
        places.setdefault(row.tobytes(), []).append(at)
    found: list[int] = []
    for row in wanted:
        known = places.get(row.tobytes())
        if known is None:
            return None
        after = found[-1] + 1 if found else -1
        found.append(after if after in known else known[0])
    return found


def _take(encoding: Encoding, slices: Sequence[int], axis: int) -> Encoding:
    """The encoding of some slices along `axis`."""
    precision = encoding.precision
    if encoding.axis is None or (precision.granularity == "channel" and axis != encoding.axis):
        return encoding
    if precision.granularity == "block" and axis == encoding.axis:
        first, count, block = slices[0], len(slices), precision.block
        if list(slices) != list(range(first, first + count)) or first % block:
            raise NoEncoding(f"it is cut through blocks of {block}")
        places = range(first // block, -(-(first + count) // block))
    else:
        places = slices
    along = 0 if precision.granularity == "channel" else axis
    return encoding.with_arrays(partial(np.take, indices=places, axis=along))


def _join(
    array: np.ndarray, sources: Sequence[EncodedArray], why: list[str]
) -> tuple[Encoding, tuple[str, ...]] | None:
    """The encoding of `array` if it is made of sources side by side."""
    for axis in range(array.ndim):
        pieces: list[EncodedArray] = []
        place = 0
        while place < array.shape[axis]:
            piece = _piece_at(array, axis, place, sources)
            if piece is None:
                break
            pieces.append(piece)
            place += piece.array.shape[axis]
        if place == array.shape[axis] and len(pieces) > 1:
            try:
                return _concatenate(pieces, axis), tuple(piece.name for piece in pieces)
            except NoEncoding as error:
                why.append(str(error))
                return None
    return None


def _piece_at(array: np.ndarray, axis: int, place: int, sources: Sequence[EncodedArray]) -> EncodedArray | None:
    for source in sources:
        for turned in _turn(source):
            end = place + (turned.array.shape[axis] if turned.array.ndim == array.ndim else 0)
            part = array[(*[slice(None)] * axis, slice(place, end))]
            if place < end <= array.shape[axis] and np.array_equal(part, turned.array):
                return turned
    return None


def _concatenate(pieces: Sequence[EncodedArray], axis: int) -> Encoding:
    first = pieces[0].encoding
    names = ", ".join(repr(piece.name) for piece in pieces)
    if any((piece.encoding.precision, piece.encoding.axis) != (first.precision, first.axis) for piece in pieces):
        raise NoEncoding(f"it is joined of {names}, which have other formats")
    is_along = first.axis is not None and (first.precision.granularity == "block" or axis == first.axis)
    if not is_along:
        if any(not is_same_encoding(first, piece.encoding) for piece in pieces):
            raise NoEncoding(f"it is joined of {names}, which have other scales")
        return first
    block = first.precision.block
    if block and axis == first.axis and any(piece.array.shape[axis] % block for piece in pieces[:-1]):
        raise NoEncoding(f"it is joined of {names}, which end inside of a block")
    along = 0 if first.precision.granularity == "channel" else axis
    scale = np.concatenate([piece.encoding.scale for piece in pieces], axis=along)
    zero = np.concatenate([piece.encoding.zero_point for piece in pieces], axis=along)
    return replace(first, scale=scale, zero_point=zero)


Array = np.ndarray[Any, np.dtype[Any]]

LEAST_NUMBERS: Final = 2
"""The fewest numbers of a slice that show a factor: with a single number, every other number is a multiple."""

ROUNDING: Final = 4
"""Units of the last place: both the factor and the product are rounded, in either model."""


def scale_encoding(array: Array, encoding: Encoding, scaled: Array) -> Encoding | None:
    """The encoding that quantizes `scaled` to the same integers as `encoding` does `array`; None if `scaled` is not a
    multiple of `array`.

    Raises:
        NoEncoding: `scaled` is a multiple of `array`, and no encoding of the same format gives the same integers.
    """
    if array.shape != scaled.shape or array.dtype != scaled.dtype:
        return None
    first = encoding.axis or 0
    for axis in sorted(range(array.ndim), key=lambda axis: axis != first):
        factors = _find_factors(array, scaled, axis)
        if factors is not None:
            return _multiply(array, encoding, factors, axis)
    return None


def _find_factors(array: Array, scaled: Array, axis: int) -> Array | None:
    """The factor of each slice along `axis`; 1 for a slice of zeros."""
    olds, news = (
        np.moveaxis(matrix, axis, 0).reshape(matrix.shape[axis], -1).astype(np.float64) for matrix in (array, scaled)
    )
    if olds.shape[1] < LEAST_NUMBERS or not (np.isfinite(olds).all() and np.isfinite(news).all()):
        return None
    at = np.abs(olds).argmax(axis=1)[:, None]
    largest, made = (np.take_along_axis(rows, at, axis=1)[:, 0] for rows in (olds, news))
    factors = np.divide(made, largest, out=np.ones_like(made), where=largest != 0)
    limits = np.finfo(array.dtype)
    wanted = olds * factors[:, None]
    allowed = ROUNDING * (limits.eps * np.abs(wanted) + limits.smallest_subnormal)
    return factors if bool((np.abs(news - wanted) <= allowed).all()) else None


def _multiply(array: Array, encoding: Encoding, factors: Array, axis: int) -> Encoding:
    """The encoding with the factors of the slices along `axis` in its scales."""
    if not factors.all():
        raise NoEncoding("a factor of zero takes all numbers of a slice away")
    is_along = encoding.axis is not None and (axis == encoding.axis) == (encoding.precision.granularity == "channel")
    if not is_along:
        if not np.allclose(factors, factors[0], rtol=1e-6, atol=0.0):
            raise NoEncoding(
                f"each slice along axis {axis} is multiplied by a factor of its own, which its scales cannot follow"
            )
        factors = factors[:1]
    shape = [1] * encoding.scale.ndim
    if encoding.scale.ndim:
        shape[0 if encoding.precision.granularity == "channel" else axis] = -1
    spread = np.broadcast_to(factors.reshape(shape), encoding.scale.shape)
    scale = (encoding.scale.astype(np.float64) * np.abs(spread)).astype(np.float32)
    if not scale.all():
        raise NoEncoding("its factors are too small for a scale of 32 bits")
    return replace(encoding, scale=scale, zero_point=_mirror(array, encoding, spread < 0))


def _mirror(array: Array, encoding: Encoding, is_mirrored: Array) -> Array:
    """The zero points where numbers whose scales are marked in `is_mirrored` have changed their sign."""
    if not is_mirrored.any():
        return encoding.zero_point
    precision = encoding.precision
    if not precision.symmetric:
        return np.where(is_mirrored, precision.lowest + precision.highest - encoding.zero_point, encoding.zero_point)
    zero, scale, marked = (
        encoding.spread(array, param) for param in (encoding.zero_point, encoding.scale, is_mirrored)
    )
    mirrored = zero - np.rint(array.astype(np.float64) / scale)
    if (np.broadcast_to(marked, array.shape) & ((mirrored < precision.lowest) | (mirrored > precision.highest))).any():
        raise NoEncoding("a negative factor turns its lowest number into one that its format does not have")
    return encoding.zero_point
