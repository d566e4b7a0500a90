"""Whether a stored tensor holds the elements of others: transposed, reshaped, cut, joined, or multiplied by factors.

Relations are read from the elements, so they hold for any pass that makes the tensor: bit by bit where elements move,
and up to rounding where they are multiplied. Where two tensors are only to be recognized as transposed or reshaped,
`TensorForms` compares their digests, so that each tensor is read once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Final

import numpy as np
from onnx import TensorProto

from passes.weights.detached import DetachedModel
from passes.weights.stand_ins import Array

Order = tuple[int, ...]
"""An order of axes, as `np.transpose` takes it."""

MOST_AXES: Final = 5
"""The rank up to which orders of axes are tried."""

LEAST_ELEMENTS: Final = 2
"""The fewest elements of a slice that show a factor: with a single element, every other element is a multiple."""

ROUNDING: Final = 4
"""Units of the last place: both the factor and the product are rounded, in either model."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The elements of source number `source`, transposed by `order`, in another shape."""

    source: int
    order: Order


@dataclass(frozen=True, slots=True)
class Cut:
    """The slices with these indices, along `axis`, of source number `source`, transposed by `order`."""

    source: int
    order: Order
    axis: int
    slices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """Several sources joined along `axis`."""

    pieces: tuple[Moved, ...]
    axis: int


@dataclass(frozen=True, slots=True)
class Scaled:
    """The source at `index`, transposed by `order`, with a factor for each slice along `axis`."""

    source: int
    order: Order
    axis: int
    factors: Array


Relation = Moved | Cut | Joined | Scaled


def find_relations(array: Array, sources: Sequence[Array], axes: Sequence[int | None]) -> Iterator[Relation]:
    """How `array` may be made of `sources`, the closest relations first.

    Args:
        array: the tensor to explain.
        sources: tensors that it may be made of.
        axes: for each source the axis along which factors are looked for first.
    """
    orders = [(index, order) for index, source in enumerate(sources) for order in _every_order(source.ndim)]
    for index, order in orders:
        source = sources[index].transpose(order)
        if source.size == array.size and np.array_equal(source.reshape(array.shape), array):
            yield Moved(index, order)
            continue
        axis = _shorter_axis(source.shape, array.shape)
        slices = None if axis is None else _find_slices(source, array, axis)
        if axis is not None and slices is not None:
            yield Cut(index, order, axis, slices)
    for axis in range(array.ndim) if len(sources) > 1 else ():
        pieces = _find_pieces(array, axis, sources)
        if pieces is not None:
            yield Joined(pieces, axis)
    for index, order in orders:
        first = axes[index]
        found = _find_factors(sources[index].transpose(order), array, 0 if first is None else order.index(first))
        if found is not None:
            yield Scaled(index, order, *found)


def orders_of(rank: int) -> Iterator[Order]:
    """The orders of axes other than the stored order; none above `MOST_AXES`."""
    return (order for order in permutations(range(rank)) if rank <= MOST_AXES and order != tuple(range(rank)))


def _every_order(rank: int) -> Iterator[Order]:
    yield tuple(range(rank))
    yield from orders_of(rank)


def _shorter_axis(shape: tuple[int, ...], part: tuple[int, ...]) -> int | None:
    """The only axis along which `part` is shorter."""
    if len(shape) != len(part):
        return None
    axes = [axis for axis, (size, cut) in enumerate(zip(shape, part, strict=True)) if size != cut]
    return axes[0] if len(axes) == 1 and part[axes[0]] < shape[axes[0]] else None


def _find_slices(whole: Array, part: Array, axis: int) -> tuple[int, ...] | None:
    """For each slice of `part` along `axis`, its index in `whole`; neighbours where equal slices leave a choice."""
    rows, wanted = (np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1) for array in (whole, part))
    indices: dict[bytes, list[int]] = {}
    for index, row in enumerate(rows):
        indices.setdefault(row.tobytes(), []).append(index)
    found: list[int] = []
    for row in wanted:
        known = indices.get(row.tobytes())
        if known is None:
            return None
        after = found[-1] + 1 if found else -1
        found.append(after if after in known else known[0])
    return tuple(found)


def _find_pieces(array: Array, axis: int, sources: Sequence[Array]) -> tuple[Moved, ...] | None:
    """The sources that, joined along `axis`, are `array`."""
    pieces: list[Moved] = []
    start = 0
    while start < array.shape[axis]:
        piece = _piece_at(np.moveaxis(array, axis, 0)[start:], axis, sources)
        if piece is None:
            return None
        pieces.append(piece)
        start += sources[piece.source].shape[piece.order[axis]]
    return tuple(pieces) if len(pieces) > 1 else None


def _piece_at(rest: Array, axis: int, sources: Sequence[Array]) -> Moved | None:
    """The source with which `rest` begins, along its first axis, which is `axis` of the joined tensor."""
    for index, source in enumerate(sources):
        for order in _every_order(source.ndim) if source.ndim == rest.ndim else ():
            piece = np.moveaxis(source.transpose(order), axis, 0)
            if 0 < len(piece) <= len(rest) and np.array_equal(rest[: len(piece)], piece):
                return Moved(index, order)
    return None


def _find_factors(array: Array, scaled: Array, first: int) -> tuple[int, Array] | None:
    """The axis whose slices have a factor each, and the factors (1 for a slice of zeros); the axis `first` is tried
    first."""
    if array.shape != scaled.shape or array.dtype != scaled.dtype:
        return None
    for axis in sorted(range(array.ndim), key=lambda axis: axis != first):
        factors = _factors_along(array, scaled, axis)
        if factors is not None:
            return axis, factors
    return None


def _factors_along(array: Array, scaled: Array, axis: int) -> Array | None:
    olds, news = (
        np.moveaxis(matrix, axis, 0).reshape(matrix.shape[axis], -1).astype(np.float64) for matrix in (array, scaled)
    )
    if olds.shape[1] < LEAST_ELEMENTS or not (np.isfinite(olds).all() and np.isfinite(news).all()):
        return None
    at = np.abs(olds).argmax(axis=1)[:, None]
    largest, made = (np.take_along_axis(rows, at, axis=1)[:, 0] for rows in (olds, news))
    factors = np.divide(made, largest, out=np.ones_like(made), where=largest != 0)
    limits = np.finfo(array.dtype)
    wanted = olds * factors[:, None]
    allowed = ROUNDING * (limits.eps * np.abs(wanted) + limits.smallest_subnormal)
    return factors if bool((np.abs(news - wanted) <= allowed).all()) else None


class TensorForms:
    """Stored tensors of a model, by content; each is digested once for each order of its axes that is needed.

    Args:
        tensors: each under a key.
    """

    def __init__(self, model: DetachedModel, tensors: Mapping[int, TensorProto]) -> None:
        self._model = model
        self._by_dims: dict[tuple[int, ...], dict[int, TensorProto]] = defaultdict(dict)
        """Type and sorted dims → the tensors."""
        self._by_size: dict[tuple[int, int], dict[int, TensorProto]] = defaultdict(dict)
        self._known: dict[Hashable, dict[str, int]] = {}
        for key, tensor in tensors.items():
            if tensor.dims and tensor.data_type != TensorProto.STRING:
                self._by_size[tensor.data_type, math.prod(tensor.dims)][key] = tensor
                self._by_dims[tensor.data_type, *sorted(tensor.dims)][key] = tensor

    def find(self, other: TensorProto, digest: str) -> tuple[str, int] | None:
        """In which form `other`, a tensor with this `digest`, holds one of the tensors: "" (the same shape), "reshaped"
        or "transposed"; with the key of the tensor. None if `other` holds none of them."""
        size = (other.data_type, math.prod(other.dims))
        key = self._find("stored", size, digest, lambda: self._stored_digests(size))
        if key is not None:
            return "" if self._by_size[size][key].dims == other.dims else "reshaped", key
        dims = (other.data_type, *other.dims)
        key = self._find("transposed", dims, digest, lambda: self._transposed_digests(other))
        return None if key is None else ("transposed", key)

    def _find(
        self, how: str, key: tuple[int, ...], digest: str, digests: Callable[[], Iterator[tuple[str, int]]]
    ) -> int | None:
        """The first tensor with this digest; the first call for a `key` computes all its `digests`."""
        if (how, key) not in self._known:
            known = self._known[how, key] = {}
            for digest_of_tensor, tensor_key in digests():
                known.setdefault(digest_of_tensor, tensor_key)
        return self._known[how, key].get(digest)

    def _stored_digests(self, size: tuple[int, int]) -> Iterator[tuple[str, int]]:
        return ((self._model.digest(tensor), key) for key, tensor in self._by_size[size].items())

    def _transposed_digests(self, other: TensorProto) -> Iterator[tuple[str, int]]:
        """The digests of all tensors that, in another order of axes, have the dims of `other`."""
        for key, tensor in self._by_dims[other.data_type, *sorted(other.dims)].items():
            for order in orders_of(len(tensor.dims)):
                if [tensor.dims[axis] for axis in order] == list(other.dims):
                    yield self._model.transposed_digest(tensor, order), key
