"""Find products of one input that a step has merged into one, by their weights: no structure need know them.

A wide matrix that a step brings in, and that has all rows of several matrices from before, is their concatenation, side
by side or head by head, whatever operator reads it. So is a Concat of them that is not folded.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto

from passes.graph.op_facts import PASSING_OPS
from passes.structures.projection import Projection, as_projection
from passes.structures.view import GraphView, modules_of
from passes.weights.detached import DetachedModel

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class MergedProducts:
    """Products of one input, by module or else by weight, that read one matrix now; `weights` are their digests."""

    names: tuple[str, ...]
    weights: frozenset[str]

    def __str__(self) -> str:
        return f"{', '.join(self.names[:-1])} and {self.names[-1]}"


def find_merged_products(
    before: DetachedModel, after: DetachedModel, known: Sequence[frozenset[str]] = ()
) -> tuple[MergedProducts, ...]:
    """The products of `before` that `after` has merged, without products whose matrices are all in one set
    of `known` digests: a structure reports these."""
    old = set(_matrices(before))
    new = [tensor for digest, tensor in _matrices(after).items() if digest not in old and not after.is_unread(tensor)]
    joined = set(_concats(after)) - set(_concats(before))
    if not new and not joined:
        return ()
    wide = [_WideMatrix(after.array(tensor)) for tensor in new]
    found: dict[frozenset[str], MergedProducts] = {}
    for group in _products_of_one_input(before):
        if any(digests.issuperset(group) for digests in known):
            continue
        parts = [frozenset(digest for digest in group if digest in digests) for digests in joined]
        parts += [_parts_of(matrix, group, before) for matrix in wide]
        for digests in parts:
            if len(digests) > 1 and not any(digests <= earlier for earlier in (*found, *known)):
                names = tuple(_name_of(group[digest]) for digest in group if digest in digests)
                found[digests] = MergedProducts(names, digests)
    return tuple(found.values())


def _matrices(model: DetachedModel) -> dict[str, TensorProto]:
    """Digest → stored tensor of two or more axes."""
    stored = [tensor for tensor in model.proto.graph.initializer if sum(dim > 1 for dim in tensor.dims) > 1]
    return {model.digest(tensor): tensor for tensor in stored if tensor.data_type != TensorProto.STRING}


def _concats(model: DetachedModel) -> Iterator[frozenset[str]]:
    """The digests of the matrices that each Concat of constants joins."""
    nodes = [node for node in model.proto.graph.node if node.op_type in ("Concat", "ConcatFromSequence")]
    if not nodes:
        return
    view = GraphView(model)
    for node in nodes:
        tensors = [view.weight_behind(name) for name in node.input]
        matrices = [tensor for tensor in tensors if tensor is not None and sum(dim > 1 for dim in tensor.dims) > 1]
        if len(matrices) > 1:
            yield frozenset(map(model.digest, matrices))


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


def _parts_of(wide: _WideMatrix, group: dict[str, Projection], model: DetachedModel) -> frozenset[str]:
    """The digests of the matrices in a group that are parts of `wide`."""
    stored = {digest: projection.weight for digest, projection in group.items()}
    fits = [
        digest
        for digest, tensor in stored.items()
        if not model.is_unread(tensor) and math.prod(tensor.dims) < wide.array.size
    ]
    parts = frozenset(digest for digest in fits if wide.has(model.array(stored[digest])))
    return parts if sum(math.prod(stored[digest].dims) for digest in parts) <= wide.array.size else frozenset()


class _WideMatrix:
    """A matrix that may be several, with its rows along each axis."""

    def __init__(self, array: Array) -> None:
        self.array = array
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


def _all_rows(array: Array) -> Iterator[Array]:
    """The array as rows along each of its axes, and as one row for each place of the first axis."""
    for axis, size in enumerate(array.shape):
        if size > 1:
            yield np.moveaxis(array, axis, -1).reshape(-1, size)
    if array.ndim > 2:
        yield array.reshape(array.shape[0], -1)


def _name_of(projection: Projection) -> str:
    """The innermost torch module of a product, or its weight."""
    modules = modules_of(projection.node)
    return modules[-1] if modules else projection.weight.name
