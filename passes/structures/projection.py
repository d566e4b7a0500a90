"""A projection: a product of data with a constant matrix, and the way back to it from where attention uses it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from onnx import NodeProto, TensorProto

from passes.structures.axes import Product, Side, inputs_with_axis, product_of
from passes.structures.matrices import Matrix, is_rotation, matrix_digest, matrix_of
from passes.structures.view import GraphView

__all__ = ["Operand", "Projection", "computed_from", "projections_behind", "without_shared_rotation"]


@dataclass(frozen=True, slots=True)
class Operand:
    """A value that enters attention. `feature` is the axis of its features, which scores sum over and V passes on;
    `other` is its second axis, of places. None: not known."""

    name: str
    feature: int | None = None
    other: int | None = None


@dataclass(frozen=True, slots=True)
class Projection:
    """`product` multiplies data with `matrix`, its operand on `side`."""

    product: Product
    side: Side
    matrix: Matrix

    @property
    def node(self) -> NodeProto:
        return self.product.node

    @property
    def data(self) -> str:
        return self.product.operands[1 - self.side]

    @property
    def weight(self) -> TensorProto:
        return self.matrix.stored

    @property
    def value(self) -> str:
        return self.product.value

    @property
    def contracted(self) -> Operand:
        """The data, with the axis that is projected."""
        return Operand(self.data, self.product.contracted(_other(self.side)))

    def axis_of_data(self, axis: int | None) -> int | Literal["made here"] | None:
        """Which axis of the data an `axis` of the result is, if not one that the matrix makes."""
        if axis is None:
            return "made here"
        return dict(self.product.sources(axis)).get(_other(self.side), "made here")


def projections_behind(view: GraphView, operand: Operand) -> list[Projection]:
    """The projections that `operand` is made from, heads and norms aside; the nearest first.

    Those count that make its features, or else its other axis: attention over channels has the two the other way
    round. Behind a norm there may be a residual sum, whose terms are computed one from the other: then the operand is
    no projection, but a hidden state, and nothing is found.
    """
    for axis in dict.fromkeys((operand.feature, operand.other)):
        found = _reach(view, operand.name, axis, HEAD_OPS)
        if _is_chain(view, found):
            found = _reach(view, operand.name, axis, HEAD_OPS - NORM_OPS)
        if found:
            return found
    return []


def without_shared_rotation(
    view: GraphView, ones: list[Projection], others: list[Projection]
) -> tuple[list[Projection], list[Projection]]:
    """The same, with what stands behind each matrix that both sides share, where these are projections apart.

    Q and K may be turned alike, as scores do not change by it: by a rotary embedding spelled as a product, say.
    """
    shared = _digests(view, ones) & _digests(view, others)
    if not shared or {one.value for one in ones} & {one.value for one in others}:
        return ones, others
    passed = [list(_behind_shared(view, side, shared)) for side in (ones, others)]
    known = [{one.value for one in side} for side in passed]
    return (ones, others) if not all(known) or known[0] & known[1] else (passed[0], passed[1])


def computed_from(view: GraphView, node: NodeProto, source: NodeProto) -> bool:
    """Whether something of `source` goes into `node`. Looks no further up than `source` stands in the graph."""
    limit = view.position[source.output[0]]
    seen: set[str] = set()
    front = list(node.input)
    while front:
        name = front.pop()
        if name in source.output:
            return True
        if name not in seen and view.position.get(name, -1) > limit:
            seen.add(name)
            front.extend(view.producers[name].input)
    return False


def _digests(view: GraphView, projections: Iterable[Projection]) -> set[str]:
    return {matrix_digest(view, one.matrix) for one in projections}


def _behind_shared(view: GraphView, projections: Iterable[Projection], shared: set[str]) -> Iterator[Projection]:
    found: dict[str, Projection] = {}
    for one in projections:
        is_shared = matrix_digest(view, one.matrix) in shared
        behind = _reach(view, one.data, one.contracted.feature, HEAD_OPS) if is_shared else [one]
        found.update((each.value, each) for each in behind or [one])
    yield from found.values()


def _reach(view: GraphView, name: str, axis: int | None, through: frozenset[str]) -> list[Projection]:
    """The projections that make the `axis` of `name`; one that turns heads does not count, but what it turns."""
    found: dict[str, Projection] = {}
    seen: set[tuple[str, int | None]] = set()
    front = deque([(name, axis, 0)])
    while front:
        value, axis, passed = front.popleft()
        node = view.producers.get(value)
        if node is None or (node.output[0], axis) in seen or value in view.folded:
            continue
        seen.add((node.output[0], axis))
        projection = _as_projection(view, node)
        if projection is None:
            if node.op_type in through and _carries(node, value):
                front.extend((*one, passed) for one in inputs_with_axis(view, node, axis))
            continue
        before = projection.axis_of_data(axis)
        if before != "made here":
            if passed < MOST_PASSED:
                front.append((projection.data, before, passed + 1))
            continue
        turned = _turned_heads(view, projection)
        found.update((one.value, one) for one in turned or [projection])
    return list(found.values())


def _turned_heads(view: GraphView, projection: Projection) -> list[Projection]:
    """The projections whose heads a rotation turns, each by itself; none if `projection` is no such rotation.

    Its matrix is smaller than what is projected behind it, since heads are split off in between.
    """
    size = view.dims(projection.matrix.value)
    if size is None or len(size) < 2 or size[-1] != size[-2] or not isinstance(size[-1], int):
        return []
    # Asked first: the way back from each projection to those before it would lead through the whole model.
    if not is_rotation(view, projection.matrix):
        return []
    data = projection.contracted
    behind = _reach(view, data.name, data.feature, HEAD_OPS)
    return behind if behind and all(_columns(view, one) > size[-1] for one in behind) else []


def _columns(view: GraphView, projection: Projection) -> int:
    """How many features a projection makes; 0 if that is not known."""
    dims, axis = view.dims(projection.matrix.value), projection.product.free(projection.side)
    size = dims[axis] if dims is not None and axis is not None and -axis <= len(dims) else 0
    return size if isinstance(size, int) else 0


def _carries(node: NodeProto, value: str) -> bool:
    """Whether `value` is the data among what `node` makes, and no statistics or mask beside it."""
    return value == node.output[0] or node.op_type in ("Split", "RotaryEmbedding")


def _is_chain(view: GraphView, found: list[Projection]) -> bool:
    return any(computed_from(view, one.node, other.node) for one in found for other in found if one is not other)


def _as_projection(view: GraphView, node: NodeProto) -> Projection | None:
    product = product_of(view, node)
    if product is None:
        return None
    sides: tuple[Side, Side] = (1, 0)
    for side in sides:
        if product.operands[1 - side] in view.folded or product.operands[side] not in view.folded:
            continue
        matrix = matrix_of(view, product.operands[side])
        if matrix is not None and _is_matrix(view, node, side, matrix):
            return Projection(product, side, matrix)
    return None


def _is_matrix(view: GraphView, node: NodeProto, side: Side, matrix: Matrix) -> bool:
    """A matrix or a stack of them (torch keeps the heads of an Einsum's weight apart), or a 1×1 Conv, which mixes
    channels at each place: all of them, or those of each group."""
    dims = view.dims(matrix.value) or tuple(matrix.stored.dims)
    if "Conv" in node.op_type:
        return side == 1 and len(dims) > 2 and set(dims[2:]) == {1} and dims[1] != 1
    return len(dims) >= 2 and sum(dim != 1 for dim in dims) > 1


def _other(side: Side) -> Side:
    return 0 if side else 1


MOST_PASSED: Final = 2
"""Products over other axes between attention and a projection: Linformer has one, of places."""

NORM_OPS: Final = frozenset(
    {
        *("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "LpNormalization"),
        *("Pow", "ReduceMean", "ReduceL2", "Sqrt", "Reciprocal"),
    }
)
"""What a norm is, whole or spelled out. Q and K may have norms of their own; a block begins with one too."""

CURVE_OPS: Final = frozenset(
    {
        *("Relu", "LeakyRelu", "PRelu", "Elu", "Selu", "Celu", "Gelu", "Sigmoid", "HardSigmoid", "HardSwish", "Mish"),
        *("Tanh", "Softplus", "Softsign", "Exp", "Erf", "Cos", "Sin", "Abs", "Softmax", "Max", "Min", "Swish"),
    }
)
"""Curves behind a projection, such as the feature maps of linear attention."""

HEAD_OPS: Final = frozenset(
    {
        *NORM_OPS,
        *CURVE_OPS,
        *("Reshape", "Transpose", "Identity", "Cast", "CastLike", "Squeeze", "Unsqueeze", "Expand", "Tile", "Flatten"),
        *("Add", "Sub", "Mul", "Div", "Neg", "Concat", "Slice", "Split", "Gather", "Where", "Pad"),
        *("SequenceAt", "SplitToSequence", "Clip", "RotaryEmbedding", "Dropout", "BatchNormalization"),
        *("QuantizeLinear", "DequantizeLinear", "ScatterElements", "ScatterND"),
    }
)
"""What may stand between a projection and its place in attention: heads, rotary embedding, norms, curves, KV cache."""
