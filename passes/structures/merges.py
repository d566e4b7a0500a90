"""Find products of one input that a step has merged into one, by their weights: no structure need know them.

A wide matrix that a step brings in, and that has all rows of several matrices from before, is their concatenation, side
by side or head by head, whatever operator reads it. So is a Concat of them that is not folded. A step may scale or
quantize what it merges, which leaves the signs: rows with the signs of a matrix that is gone stand for it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from onnx import TensorProto

from passes.graph.op_facts import PASSING_OPS
from passes.structures.projection import Projection, as_projection
from passes.structures.view import GraphView, modules_of
from passes.suggest import join_words
from passes.weights.detached import DetachedModel
from passes.weights.stand_ins import Array


@dataclass(frozen=True, slots=True)
class MergedProducts:
    """Products of one input, by module or else by weight, that read one matrix now; `weights` are their digests."""

    names: tuple[str, ...]
    weights: frozenset[str]

    def __str__(self) -> str:
        return join_words(self.names, "and")


def find_merged_products(
    before: DetachedModel, after: DetachedModel, known: Sequence[frozenset[str]] = ()
) -> tuple[MergedProducts, ...]:
    """The products of `before` that `after` has merged, without products whose matrices are all in one set
    of `known` digests: a structure reports these."""
    old = set(_matrices(before))
    left = _matrices(after)
    new = [tensor for digest, tensor in left.items() if digest not in old and not after.is_unread(tensor)]
    joined = set(_concats(after)) - set(_concats(before))
    if not new and not joined:
        return ()
    resized = _of_new_shape(new, (tensor for digest, tensor in _matrices(before).items() if digest not in left))
    wide = [_WideMatrix(after.array(tensor), tensor.name in resized) for tensor in new]
    found: dict[frozenset[str], MergedProducts] = {}
    for group in _products_of_one_input(before):
        if any(digests.issuperset(group) for digests in known):
            continue
        parts = [frozenset(digest for digest in group if digest in digests) for digests in joined]
        parts += [_parts_of(matrix, group, before, left.keys()) for matrix in wide]
        for digests in parts:
            if len(digests) > 1 and not any(digests <= earlier for earlier in (*found, *known)):
                names = tuple(_name_of(group[digest]) for digest in group if digest in digests)
                found[digests] = MergedProducts(names, digests)
    return tuple(found.values())


def has_siblings(model: DetachedModel, known: Sequence[frozenset[str]]) -> bool:
    """Whether several products multiply one value with matrices that are not all in one set of `known` digests."""
    groups = map(frozenset, _products_of_one_input(model))
    return any(not any(digests >= group for digests in known) for group in groups)


def _matrices(model: DetachedModel) -> dict[str, TensorProto]:
    """Digest → stored tensor of two or more axes."""
    stored = [tensor for tensor in model.proto.graph.initializer if sum(dim > 1 for dim in tensor.dims) > 1]
    return {model.digest(tensor): tensor for tensor in stored if tensor.data_type != TensorProto.STRING}


def _of_new_shape(new: Iterable[TensorProto], gone: Iterable[TensorProto]) -> set[str]:
    """The names of `new` tensors that are no matrix of those `gone` in another type, by their count for each shape."""
    shapes = Counter(tuple(sorted(tensor.dims)) for tensor in gone)
    names = set[str]()
    for tensor in new:
        shape = tuple(sorted(tensor.dims))
        if shapes[shape]:
            shapes[shape] -= 1
        else:
            names.add(tensor.name)
    return names


def _concats(model: DetachedModel) -> Iterator[frozenset[str]]:
    """The digests of the stored tensors that each Concat joins."""
    nodes = [node for node in model.proto.graph.node if node.op_type in ("Concat", "ConcatFromSequence")]
    if not nodes:
        return
    view = GraphView(model)
    for node in nodes:
        tensors = [view.find_weight(name) for name in node.input]
        yield frozenset(model.digest(tensor) for tensor in tensors if tensor is not None)


def _products_of_one_input(model: DetachedModel) -> list[dict[str, Projection]]:
    """For each value that several products multiply with matrices: digest of the matrix → product."""
    view = GraphView(model)
    groups: dict[str, dict[str, Projection]] = defaultdict(dict)
    for node in view.own:
        projection = as_projection(view, node)
        if projection is not None:
            source = view.origin_of(projection.data, PASSING_OPS, pairs=True)
            groups[source].setdefault(model.digest(projection.weight), projection)
    return [group for group in groups.values() if len(group) > 1]


def _parts_of(
    wide: _WideMatrix, group: dict[str, Projection], model: DetachedModel, left: Collection[str]
) -> frozenset[str]:
    """The digests of the matrices in a group that are parts of `wide`; `left` are those still stored on their own."""
    stored = {digest: projection.weight for digest, projection in group.items()}
    fits = [
        digest
        for digest, tensor in stored.items()
        if not model.is_unread(tensor) and math.prod(tensor.dims) < wide.array.size
    ]
    parts = frozenset(
        digest
        for digest in fits
        if wide.has(array := model.array(stored[digest])) or (digest not in left and wide.has_signs(array))
    )
    return parts if sum(math.prod(stored[digest].dims) for digest in parts) <= wide.array.size else frozenset()


class _WideMatrix:
    """A matrix that may be several, with its rows along each axis; `is_resized` if no matrix before had its shape."""

    def __init__(self, array: Array, is_resized: bool) -> None:
        self.array, self.is_resized = array, is_resized
        self._rows: dict[int, set[bytes]] = {}

    def has(self, part: Array) -> bool:
        """Whether all rows of `part`, along one of its axes, are rows of this matrix."""
        if part.dtype != self.array.dtype or not part.ndim:
            return False
        return any(self._has_rows(rows) for rows in _all_rows(part))

    def _has_rows(self, rows: Array) -> bool:
        first = rows[0]
        if len(rows) < 2 or bool(np.all(rows == first)):
            return False  # zeros, as of an adapter before its training, are in every matrix of zeros
        length = first.size
        near = (own for own in _all_rows(self.array) if own.shape[1] == length)
        if not any(np.array_equal(own[at], first) for own in near for at in np.flatnonzero(own[:, 0] == first[0])):
            return False
        if length not in self._rows:
            self._rows[length] = {
                row.tobytes() for own in _all_rows(self.array) if own.shape[1] == length for row in own
            }
        return all(row.tobytes() in self._rows[length] for row in rows)

    def has_signs(self, part: Array) -> bool:
        """Whether rows of this matrix have the signs of rows of `part`, or all of their opposites.

        Zeros of either, as quantization makes them, are left out; a tenth of the other signs may differ, as where
        the zero point is only guessed.
        """
        return self.is_resized and any(
            _has_signs(
                np.sign(own.astype(np.float32) - zero), np.sign(rows[:: -(-len(rows) // SAMPLED)].astype(np.float32))
            )
            for rows in _all_rows(part)
            for own in _all_rows(self.array)
            if own.shape[1] == rows.shape[1]
            for zero in self._zero_points()
        )

    def _zero_points(self) -> tuple[float, ...]:
        """What may stand for zero: in unsigned integers the middle of their range, or of what is stored."""
        if not self.array.dtype.name.startswith("uint"):
            return (0.0,)
        return 2.0 ** (8 * self.array.dtype.itemsize - 1), float(np.median(self.array.astype(np.float32)))


def _has_signs(wide: Array, rows: Array) -> bool:
    if rows.shape[1] < 8 or rows.size < LEAST_SIGNS or _agreement(rows, rows).sum() > len(rows):
        return False  # too few, or rows that are alike, as those of weights that are all positive
    found = _agreement(wide, rows)
    return bool(found.any(0).all()) and int(found.any(1).sum()) >= len(rows)


def _agreement(left: Array, right: Array) -> Array:
    """Whether each row of `left` has the signs of each row of `right`."""
    counted = np.abs(left) @ np.abs(right).T
    return (np.abs(left @ right.T) >= 0.9 * counted) & (counted > left.shape[1] / 2)


SAMPLED: Final = 16
"""Rows of a matrix whose signs are looked for."""

LEAST_SIGNS: Final = 64
"""Elements of those rows: the signs of fewer may agree by chance."""


def _all_rows(array: Array) -> Iterator[Array]:
    """The array as rows along each of its axes, and as one row for each index of the first axis."""
    for axis, size in enumerate(array.shape):
        if size > 1:
            yield np.moveaxis(array, axis, -1).reshape(-1, size)
    if array.ndim > 2:
        yield array.reshape(array.shape[0], -1)


def _name_of(projection: Projection) -> str:
    """The innermost torch module of a product, or its weight."""
    modules = modules_of(projection.node)
    return modules[-1] if modules else projection.weight.name
