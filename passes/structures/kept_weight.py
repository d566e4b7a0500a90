"""By what a projection's matrix is known again: its digests in each layout, type and place it may be left in."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import permutations

import numpy as np
from onnx import TensorProto, helper

from passes.model.canonical import ValueDigests
from passes.model.rounding import Sums, sums_of
from passes.structures.base import KeptWeight
from passes.structures.matrices import Matrix, matrix_values
from passes.structures.projection import Projection
from passes.structures.view import GraphView
from passes.weights.stand_ins import digest_of

__all__ = ["kept_weight"]


def kept_weight(view: GraphView, role: str, projection: Projection, meanings: ValueDigests | None) -> KeptWeight:
    """The matrix of `projection` in that `role`; `meanings` are those of the exported model, if they are needed.

    A matrix that is computed from stored tensors may be folded into one, by whoever computes in another order. So it
    is known by its numbers to rounding too.
    """
    matrix = projection.matrix
    if matrix.is_plain:
        return _named(role, projection, frozenset(_plain_digests(view, matrix)), None)
    values = matrix_values(view, matrix)
    digests = set() if values is None else {digest_of(values), *map(digest_of, _transposed(values))}
    if meanings is not None and matrix.value in meanings.values:
        digests.add(meanings.values[matrix.value])
    if _is_quantized(view, matrix):  # it may be multiplied as it is stored, and scaled afterwards
        digests.add(view.model.digest(matrix.stored))
        digests.update(view.model.turned_digest(matrix.stored, axes) for axes in _turns(matrix.stored))
    return _named(role, projection, frozenset(digests), None if values is None else sums_of(values))


def _named(role: str, projection: Projection, digests: frozenset[str], rounded: Sums | None) -> KeptWeight:
    scale = next((one.f for one in projection.node.attribute if one.name == "alpha"), 1.0)
    if scale != 1.0:
        digests = frozenset(f"{digest}*{scale}" for digest in digests)
    return KeptWeight(role, projection.weight.name, digests, rounded)


def _is_quantized(view: GraphView, matrix: Matrix) -> bool:
    """Whether it is stored in whole numbers, and nothing is cut out of them."""
    dims = view.dims(matrix.value)
    whole = matrix.stored.data_type in (TensorProto.INT8, TensorProto.UINT8)
    return whole and dims is not None and sorted(map(str, dims)) == sorted(map(str, matrix.stored.dims))


def _plain_digests(view: GraphView, matrix: Matrix) -> Iterator[str]:
    """Of the matrix in each type and layout that an optimizer may leave it in."""
    stored = matrix.stored
    yield view.model.digest(stored)
    if view.model.is_unread(stored):  # what it would be in another type cannot be said without a look at it
        yield from map(partial(view.model.turned_digest, stored), _turns(stored))
        return
    array = view.model.array(stored)
    yield from map(digest_of, _transposed(array))
    info = view.types.get(matrix.value)
    if info is not None and info.type.tensor_type.elem_type not in (0, stored.data_type):
        cast = array.astype(helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type))
        yield from map(digest_of, (cast, *_transposed(cast)))


def _turns(stored: TensorProto) -> Iterator[tuple[int, ...]]:
    """The other orders of its axes."""
    rank = len(stored.dims)
    yield from (axes for axes in permutations(range(rank)) if rank <= 3 and axes != tuple(range(rank)))


def _transposed(array: np.ndarray) -> list[np.ndarray]:
    if array.ndim == 3:
        return [array.transpose(axes) for axes in permutations(range(3)) if axes != (0, 1, 2)]
    return [array.reshape(array.shape[0], -1).T]
