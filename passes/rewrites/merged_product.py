"""A product with a constant matrix, and the stored tensors that have one slice for each of its output channels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from onnx import NodeProto, TensorProto

from passes.graph.index import constant_of, copy_of
from passes.graph.op_facts import MATRIX_PRODUCTS, attribute_of, op_of
from passes.structures.axes import Side, product_of
from passes.structures.view import NBITS, GraphView
from passes.weights.stand_ins import Array


class NotSplit(Exception):
    """Why a product cannot be taken apart, in words that follow the name of its matrix."""


@dataclass(frozen=True, slots=True)
class StoredChannels:
    """A stored tensor with the product's channels along `axis`, and the nodes between it and the product."""

    tensor: TensorProto
    axis: int
    nodes: tuple[tuple[NodeProto, int], ...] = ()
    """Each node with the axis of the channels in its output; the one nearest to the product is the first."""
    width: int = 1
    """How many elements of a channel are adjacent along the axis: the elements of one of its blocks."""

    def positions(self, channels: Array) -> Array:
        """The positions along the axis of the elements of some channels."""
        return (channels[:, None] * self.width + np.arange(self.width)).reshape(-1)


@dataclass(frozen=True, slots=True)
class MergedProduct:
    """`node`, whose output has its channels along `axis`; `weights` are its inputs that have one slice per channel."""

    node: NodeProto
    axis: int
    weights: Mapping[int, StoredChannels]
    data: str
    """What the matrix is multiplied with."""
    has_sizes_of_data: bool
    """Whether its output has the sizes of the data, but for the number of channels."""

    @property
    def value(self) -> str:
        return self.node.output[0]

    @property
    def matrix(self) -> TensorProto:
        """The merged matrix."""
        return next(iter(self.weights.values())).tensor


def read_product(view: GraphView, node: NodeProto) -> MergedProduct:
    """`node` as a product whose channels can be distinguished.

    Raises:
        NotSplit: another operator, a weight that is computed, an input of the model, or quantized in blocks.
    """
    product = product_of(view, node)
    if product is None or op_of(node) not in SPLIT_OPS:
        raise NotSplit(f"is read by a {op_of(node)}, which is not taken apart")
    sides: tuple[Side, Side] = (1, 0)
    side: Side | None = next((candidate for candidate in sides if product.operands[candidate] in view.folded), None)
    if side is None or ("Conv" in node.op_type and side == 0):
        raise NotSplit("multiplies two computed values")
    axis = product.free_axis(side)
    letters = [
        letter for letter in product.terms[side] if letter in product.out and letter not in product.terms[1 - side]
    ]
    if axis is None or len(letters) != 1:
        raise NotSplit("has its channels along more than one axis")
    if "Conv" in node.op_type and attribute_of(node, "group", 1) != 1:
        raise NotSplit("is the weight of a Conv in groups")
    channels = product.out.index(letters[0]) - len(product.out)
    count = _count_channels(view, node, channels)
    weights = {list(node.input).index(product.operands[side]): stored_channels(view, product.operands[side], axis)}
    read_input = _packed_channels if op_of(node) == NBITS else _channels_of_input
    for at, name in enumerate(node.input):
        if at not in weights and name and name != product.operands[1 - side]:
            own = read_input(view, node, name, count)
            weights |= {} if own is None else {at: own}
    data, matrix = product.operands[1 - side], view.dims(product.operands[side]) or ()
    is_left_plain = not attribute_of(node, "transA", 0)
    plain = op_of(node) in MATRIX_PRODUCTS | {"MatMulInteger", "QLinearMatMul"} and is_left_plain
    is_matrix = op_of(node) == NBITS or (plain and side == 1 and len(matrix) == 2)
    return MergedProduct(node, channels, weights, data, is_matrix)


def _count_channels(view: GraphView, node: NodeProto, axis: int) -> int:
    dims = view.dims(node.output[0])
    count = dims[axis] if dims is not None and -axis <= len(dims) else None
    if not isinstance(count, int):
        raise NotSplit("makes a value whose shape is not known")
    return count


def _channels_of_input(view: GraphView, node: NodeProto, name: str, count: int) -> StoredChannels | None:
    """A bias or a zero point with a number for each channel; None for a single number."""
    dims = view.dims(name)
    if dims is None:
        raise NotSplit(f"comes with {name}, whose shape is not known")
    if all(dim == 1 for dim in dims):
        return None
    positions = WITH_CHANNELS.get(op_of(node), range(len(node.input)))
    is_of_data = list(node.input).index(name) not in positions
    if is_of_data or dims[-1] != count or any(dim != 1 for dim in dims[:-1]) or name not in view.folded:
        raise NotSplit(f"comes with {name}, which is no bias of one number per channel")
    try:
        return stored_channels(view, name, -1)
    except NotSplit as why:
        raise NotSplit(f"comes with {name}, which {why}") from why


def _packed_channels(view: GraphView, node: NodeProto, name: str, count: int) -> StoredChannels | None:
    """The scales, zero points or bias of a MatMulNBits: rows of one channel each, also where they are one vector.

    Its group indices are of the data; None for them.
    """
    if node.input[GROUP_INDICES : GROUP_INDICES + 1] == [name]:
        return None
    try:
        stored = stored_channels(view, name, 0)
    except NotSplit as why:
        raise NotSplit(f"comes with {name}, which {why}") from why
    size = stored.tensor.dims[0] if stored.tensor.dims else 0
    if stored.nodes or size % count or not size:
        raise NotSplit(f"comes with {name}, which has no rows of its channels")
    return replace(stored, width=size // count)


def stored_channels(view: GraphView, name: str, axis: int) -> StoredChannels:
    """The stored tensor that a constant is computed from, through ops that leave its channels whole.

    Raises:
        NotSplit: it is computed by another operator, or it is an input of the model.
    """
    nodes: list[tuple[NodeProto, int]] = []
    while name not in view.initializers:
        node = view.producers.get(name)
        constant = None if node is None else constant_of(node)
        if node is None or constant is not None:
            break
        nodes.append((node, axis))
        name, axis = node.input[0], _axis_before(view, node, axis)
    tensor = view.initializers.get(name)
    if tensor is None:
        node = view.producers.get(name)
        constant = None if node is None else constant_of(node)
        if constant is None:
            raise NotSplit("is no stored tensor")
        tensor = copy_of(constant)
        tensor.name = name
    if name in view.inputs:
        raise NotSplit("is an input of the model")
    return StoredChannels(tensor, axis % len(tensor.dims), tuple(nodes))


def _axis_before(view: GraphView, node: NodeProto, axis: int) -> int:
    """The axis of the channels in the first input of a node between a stored tensor and the product."""
    dims = view.dims(node.input[0])
    if dims is None or op_of(node) not in WEIGHT_OPS:
        raise NotSplit(f"is computed by {op_of(node)}")
    rank = len(dims)
    if node.op_type == "Transpose":
        perm = attribute_of(node, "perm") or list(reversed(range(rank)))
        return perm[axis % rank]
    if node.op_type == "DequantizeLinear" and attribute_of(node, "block_size", 0):
        raise NotSplit("is quantized in blocks")
    return axis % rank


WEIGHT_OPS: Final = frozenset({"Transpose", "Identity", "Cast", "DequantizeLinear"})
"""Ops that may stand between a stored weight and the product."""

GROUP_INDICES: Final = 4
"""The position of the group indices among the inputs of MatMulNBits."""

SPLIT_OPS: Final = MATRIX_PRODUCTS | {
    *("Conv", "Einsum", "MatMulInteger", "QLinearMatMul", "com.microsoft.FusedMatMul", NBITS)
}
"""Products that are taken apart."""

WITH_CHANNELS: Final[Mapping[str, tuple[int, ...]]] = {"MatMulInteger": (3,), "QLinearMatMul": (4, 5)}
"""Quantized product → the positions of inputs that may have a number for each channel; the others are of the data."""
