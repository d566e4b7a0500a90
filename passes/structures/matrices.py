"""The constant matrix that a product reads: a stored tensor, possibly after layout ops, or computed from several.

A computed matrix may be a slice of a stack, a tensor of integers with its scales, or a direction times a length (weight
norm).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from passes.graph.index import constant_of, copy_of, extract
from passes.graph.inference import evaluate
from passes.graph.op_facts import ARRANGING, attribute_of
from passes.structures.view import GraphView
from passes.weights.stand_ins import digest_of


@dataclass(frozen=True, slots=True)
class Matrix:
    """The constant called `value`, made from `stored`, the largest tensor that it is computed from.

    The matrix `is_plain` if only layout ops and casts are between `stored` and `value`. `tensors` are all tensors that
    `value` is computed from.
    """

    value: str
    stored: TensorProto
    is_plain: bool
    tensors: tuple[TensorProto, ...]


def matrix_of(view: GraphView, name: str) -> Matrix | None:
    """The matrix `name`; None if it is computed from data, or from no stored tensor."""
    plain = _plain_tensor(view, name)
    if plain is not None:
        return Matrix(name, plain, True, (plain,))
    if name not in view.folded:
        return None
    leaves = _leaves(view, view.ancestors([name], within=view.folded), name)
    tensors = [tensor for tensor in leaves if tensor.data_type != TensorProto.STRING]
    if not tensors:
        return None
    return Matrix(name, max(tensors, key=_size), False, tuple(tensors))


def matrix_values(view: GraphView, matrix: Matrix) -> np.ndarray | None:
    """The values of a matrix as the product reads it; None where weights are unread, or it cannot be computed."""
    if any(view.model.is_unread(tensor) for tensor in matrix.tensors):
        return None
    nodes = view.ancestors([matrix.value], within=view.folded)
    if not nodes:
        return view.model.array(view.initializers[matrix.value])
    nodes = [_with_sizes(view, node) for node in nodes]
    names = dict.fromkeys(name for node in nodes for name in node.input)
    if not view.folded.issuperset(names):  # a node reads the type of a computed value
        return None
    stored = [_with_data(view, view.initializers[name]) for name in names if name in view.initializers]
    part = extract(view.model.proto, nodes, outputs=[matrix.value], initializers=stored)
    return evaluate(part)  # where that is None, a matrix is known by how it is computed alone


def _with_sizes(view: GraphView, node: NodeProto) -> NodeProto:
    """`node`, or for the Shape or Size of a computed value a Constant with its known sizes."""
    if node.op_type not in ("Shape", "Size") or node.input[0] in view.folded:
        return node
    dims = np.asarray(view.dims(node.input[0]), np.int64)
    part = slice(attribute_of(node, "start", 0), attribute_of(node, "end"))
    sizes = dims[part] if node.op_type == "Shape" else np.asarray(dims.prod(), np.int64)
    return helper.make_node("Constant", [], node.output, value=numpy_helper.from_array(sizes))


def matrix_digest(view: GraphView, matrix: Matrix) -> str:
    """A digest, equal for matrices with equal elements if these can be read; else the name of the value."""
    if matrix.is_plain and matrix.stored.name in view.initializers:
        return view.model.digest(matrix.stored)
    values = matrix_values(view, matrix)
    return matrix.value if values is None else digest_of(values)


def is_rotation(view: GraphView, matrix: Matrix) -> bool:
    """Whether the matrix is a rotation times a factor (Hadamard, a permutation), which preserves lengths."""
    if _size(matrix.stored) > MOST_READ:
        return False
    stored = _stored_square(view, matrix)
    if stored is not None and not _may_be_rotation(stored):  # a fifth of the pass stage of ViT-base goes away
        return False
    values = matrix_values(view, matrix)
    if values is None or values.ndim < 2 or values.shape[-1] != values.shape[-2] or values.shape[-1] < 2:
        return False
    rows = values.astype(np.float64)
    return _is_identity_times_factor(rows, 1) and _is_identity_times_factor(rows, rows.shape[-1])


def _stored_square(view: GraphView, matrix: Matrix) -> np.ndarray | None:
    """The stored elements of a matrix that is read as it is stored, or transposed; None for other matrices."""
    producer = view.producers.get(matrix.value)
    is_stored = producer is None or (producer.op_type == "Transpose" and producer.input[0] == matrix.stored.name)
    dims = matrix.stored.dims
    if not is_stored or matrix.stored.name not in view.initializers or len(dims) != 2 or dims[0] != dims[1]:
        return None
    return None if view.model.is_unread(matrix.stored) else view.model.array(matrix.stored)


def _may_be_rotation(matrix: np.ndarray) -> bool:
    """Whether the first row of a square matrix stands at a right angle to the next rows; only `FEW_ROWS` are read."""
    first, *others = matrix[:FEW_ROWS].astype(np.float32)
    return all(abs(float(row @ first)) <= 2 * NEARLY * float(first @ first) for row in others)


def _is_identity_times_factor(rows: np.ndarray, count: int) -> bool:
    """Whether each of the first `count` rows stands at a right angle to all other rows, and all are of one length."""
    factor = np.sum(rows * rows, axis=(-2, -1))[..., None, None] / rows.shape[-1]
    product = rows[..., :count, :] @ np.swapaxes(rows, -1, -2)
    return bool(np.all(np.abs(product - factor * np.eye(count, rows.shape[-1])) <= NEARLY * factor))


def _plain_tensor(view: GraphView, name: str) -> TensorProto | None:
    """The stored tensor that `name` is, or that of a Constant, perhaps in another layout or type."""
    name = view.origin_of(name, ARRANGING)
    node = view.producers.get(name)
    return view.initializers.get(name) if node is None else _named_constant(node)


def _leaves(view: GraphView, nodes: list[NodeProto], name: str) -> Iterator[TensorProto]:
    for value in dict.fromkeys((name, *(read for node in nodes for read in node.input))):
        if value in view.initializers:
            yield view.initializers[value]
    for node in nodes:
        constant = _named_constant(node)
        if constant is not None:
            yield constant


def _named_constant(node: NodeProto) -> TensorProto | None:
    """The tensor of a Constant node, named after its output."""
    constant = constant_of(node)
    if constant is None:
        return None
    named = copy_of(constant)
    named.name = node.output[0]
    return named


def _with_data(view: GraphView, tensor: TensorProto) -> TensorProto:
    """A tensor with its data, which may be detached."""
    return (
        tensor if view.model.weight(tensor) is None else numpy_helper.from_array(view.model.array(tensor), tensor.name)
    )


def _size(tensor: TensorProto) -> int:
    return int(np.prod(tensor.dims, dtype=np.int64))


FEW_ROWS: Final = 16
"""Rows that are read to see that a matrix is no rotation: that is seen by few rows of nearly each projection, which has
megabytes."""

MOST_READ: Final = 2**20
"""The most elements of a matrix that is tested for a rotation; rotations of heads are small."""

NEARLY: Final = 1e-2
"""The tolerance for a rotation in half precision."""
