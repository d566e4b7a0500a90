"""The encoding of a stored tensor that a pass made of others by moving their elements (transposed, reshaped, cut or
joined), or by multiplying each channel by a factor, as a BatchNormalization is folded.

`passes.weights.relations` reads from the elements what was done, so it holds for any pass that does it. Where it finds
nothing, there is no rule, and the tensor is stale.

Where the slices along one axis are those of another tensor, each multiplied by a factor, and have scales of their own,
the factor goes into these, and the integers stay as they are. With one scale for all slices they cannot: then there is
no such encoding, and the reason says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from passes.encodings.encoding import Encoding, NoEncoding, is_same_encoding
from passes.graph.op_facts import axis_in_shape
from passes.weights.relations import Cut, Joined, Moved, Order, Relation, Scaled, find_relations
from passes.weights.stand_ins import Array

CHANGED: Final = "its values are changed"


@dataclass(frozen=True, slots=True)
class EncodedArray:
    """A stored tensor of the source with its encoding."""

    name: str
    array: np.ndarray
    encoding: Encoding

    def transpose(self, order: Order) -> EncodedArray:
        """The tensor with its axes in another order; the axis of the encoding goes along."""
        encoding = self.encoding
        if encoding.axis is not None:
            encoding = replace(encoding, axis=order.index(encoding.axis))
        if encoding.precision.granularity == "block":
            encoding = encoding.with_arrays(partial(np.transpose, axes=order))
            if encoding.global_scale is not None and encoding.global_scale.ndim:
                encoding = replace(encoding, global_scale=encoding.global_scale.transpose(order))
        return EncodedArray(self.name, self.array.transpose(order), encoding)


def derive_encoding(array: np.ndarray, sources: Sequence[EncodedArray]) -> tuple[Encoding, tuple[str, ...]]:
    """The encoding that quantizes `array` to the same integers as its sources, and the names of those sources.

    Raises:
        NoEncoding: `array` does not have the values of the sources, or no encoding of the same format gives them.
    """
    why: list[str] = []
    arrays, axes = [source.array for source in sources], [source.encoding.axis for source in sources]
    for relation in find_relations(array, arrays, axes):
        try:
            return _encode(relation, array, sources)
        except NoEncoding as error:
            why.append(str(error))
    raise NoEncoding(why[0] if why else CHANGED)


def _encode(relation: Relation, array: np.ndarray, sources: Sequence[EncodedArray]) -> tuple[Encoding, tuple[str, ...]]:
    """The encoding of `array`, which is made of `sources` in this way."""
    is_scaled = any(source.encoding.global_scale is not None for source in sources)
    if is_scaled and not (isinstance(relation, Moved) and array.ndim == len(relation.order)):
        raise NoEncoding("the scales of its blocks are scaled in turn, and only a Transpose keeps these")
    if isinstance(relation, Joined):
        pieces = [sources[piece.source].transpose(piece.order) for piece in relation.pieces]
        return _concatenate(pieces, relation.axis), tuple(piece.name for piece in pieces)
    source = sources[relation.source].transpose(relation.order)
    match relation:
        case Moved():
            encoding = _reshape(source, array)
        case Cut():
            encoding = _take(source.encoding, relation.slices, relation.axis)
        case Scaled():
            encoding = _multiply(source.array, source.encoding, relation.factors, relation.axis)
    return encoding, (source.name,)


def _reshape(source: EncodedArray, array: np.ndarray) -> Encoding:
    """The encoding of `array`, which is the source in another shape."""
    encoding, axis = source.encoding, source.encoding.axis
    if axis is None or source.array.shape == array.shape:
        return encoding
    found = axis_in_shape(source.array.shape, array.shape, axis)
    if found is None:
        raise NoEncoding(f"its channels, axis {axis} of {source.name!r}, are no axis of it any more")
    if encoding.precision.granularity == "block":
        shape = tuple(size if at != found else encoding.scale.shape[axis] for at, size in enumerate(array.shape))
        encoding = encoding.with_arrays(lambda values: values.reshape(shape))
    return replace(encoding, axis=found)


def _take(encoding: Encoding, slices: Sequence[int], axis: int) -> Encoding:
    """The encoding of some slices along `axis`."""
    precision = encoding.precision
    if encoding.axis is None or (precision.granularity == "channel" and axis != encoding.axis):
        return encoding
    if precision.granularity == "block" and axis == encoding.axis:
        first, count, block = slices[0], len(slices), precision.block
        if list(slices) != list(range(first, first + count)) or first % block:
            raise NoEncoding(f"it is cut through blocks of {block}")
        blocks = range(first // block, -(-(first + count) // block))
    else:
        blocks = slices
    along = 0 if precision.granularity == "channel" else axis
    return encoding.with_arrays(partial(np.take, indices=blocks, axis=along))


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


def _multiply(array: Array, encoding: Encoding, factors: Array, axis: int) -> Encoding:
    """The encoding with the factors of the slices along `axis` in its scales."""
    if not factors.all():
        raise NoEncoding("a factor of zero removes all values of a slice")
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
    """The zero points after a change of sign of the values whose scales are marked in `is_mirrored`."""
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
