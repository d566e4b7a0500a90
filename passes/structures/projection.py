"""Projections, which are products of data with a constant matrix: find those that compute an operand of attention."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from onnx import NodeProto, TensorProto

from passes.graph.op_facts import ARRANGING
from passes.graph.traversal import NearestSources, walk
from passes.structures.axes import Product, Side, inputs_with_axis, product_of
from passes.structures.matrices import Matrix, is_rotation, matrix_digest, matrix_of
from passes.structures.view import GraphView


@dataclass(frozen=True, slots=True)
class Operand:
    """A value that enters attention. `feature` is the axis of its features, which scores sum over and V keeps; `other`
    is its second axis, of positions. None: unknown axis."""

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
        """The data, with the axis that the product sums over."""
        return Operand(self.data, self.product.contracted_axis(_other_side(self.side)))

    def axis_of_data(self, axis: int | None) -> int | Literal["made here"] | None:
        """The axis of the data that an `axis` of the result is, or "made here" for one that the matrix makes."""
        if axis is None:
            return "made here"
        return dict(self.product.sources(axis)).get(_other_side(self.side), "made here")


class ProjectionSearch:
    """The projections that the values of a graph are made from; what was found for a value is found once."""

    def __init__(self, view: GraphView) -> None:
        self.view = view
        self._sources: NearestSources[_AxisVisit, Projection] = NearestSources(self._expand)
        self._depends: dict[tuple[str, str], bool] = {}

    def projections_of(self, operand: Operand) -> list[Projection]:
        """The projections from which `operand` is computed, seen through heads and norms; the nearest first.

        They compute its features, or else its other axis: attention over channels swaps the two. Before a norm there
        may be a residual sum, whose terms are computed one from the other: then the operand is a hidden state, no
        projection, and the result is empty.
        """
        for axis in dict.fromkeys((operand.feature, operand.other)):
            projections = self._reach(operand.name, axis, HEAD_OPS)
            if self._is_chain(projections):
                projections = self._reach(operand.name, axis, HEAD_OPS - NORM_OPS)
            if projections:
                return projections
        return []

    def before_shared_matrix(self, query: Operand, key: Operand) -> tuple[list[Projection], list[Projection]]:
        """The projections of `query` and of `key`; if both read one matrix, the projections before that matrix.

        One matrix may rotate Q and K, which does not change the scores: a rotary embedding that is written as a
        product. The projections before the matrix count only if those of `query` and of `key` are distinct.
        """
        first, second = self.projections_of(query), self.projections_of(key)
        if _values(first) & _values(second):
            return first, second
        shared = self._digests(first) & self._digests(second)
        if not shared:
            return first, second
        before = [list(self._before_shared(side, shared)) for side in (first, second)]
        known = [_values(side) for side in before]
        return (first, second) if not all(known) or known[0] & known[1] else (before[0], before[1])

    def depends(self, node: NodeProto, source: NodeProto) -> bool:
        """Whether `node` is computed from `source`. The search stops at the position of `source` in the graph."""
        key = node.output[0], source.output[0]
        if key not in self._depends:
            self._depends[key] = _depends(self.view, node, source)
        return self._depends[key]

    def _digests(self, projections: Iterable[Projection]) -> set[str]:
        return {matrix_digest(self.view, projection.matrix) for projection in projections}

    def _before_shared(self, projections: Iterable[Projection], shared: set[str]) -> Iterator[Projection]:
        distinct: dict[str, Projection] = {}
        for projection in projections:
            is_shared = matrix_digest(self.view, projection.matrix) in shared
            data = projection.contracted
            before = self._reach(data.name, data.feature, HEAD_OPS) if is_shared else [projection]
            distinct.update((source.value, source) for source in before or [projection])
        yield from distinct.values()

    def _is_chain(self, projections: list[Projection]) -> bool:
        return any(
            self.depends(projection.node, source.node)
            for projection in projections
            for source in projections
            if projection is not source
        )

    def _reach(self, name: str, axis: int | None, through: frozenset[str]) -> list[Projection]:
        """The projections that make the `axis` of `name`; for a rotation of heads, the projections before it."""
        return self._sources.of(_AxisVisit(name, axis, 0, through))

    def _expand(self, visit: _AxisVisit) -> tuple[dict[Hashable, Projection], list[_AxisVisit]]:
        node = self.view.producers.get(visit.value)
        if node is None or visit.value in self.view.folded:
            return {}, []
        projection = as_projection(self.view, node)
        if projection is None:
            passes_on = node.op_type in visit.through and _carries(node, visit.value)
            if not passes_on and not _is_depthwise(self.view, node):
                return {}, []
            inputs = inputs_with_axis(self.view, node, visit.axis)
            return {}, [visit._replace(value=name, axis=axis) for name, axis in inputs]
        before = projection.axis_of_data(visit.axis)
        if before != "made here":
            passed = visit.passed + 1
            on = [visit._replace(value=projection.data, axis=before, passed=passed)] if passed <= MOST_PASSED else []
            return {}, on
        return {producer.value: producer for producer in self._rotated_heads(projection) or [projection]}, []

    def _rotated_heads(self, projection: Projection) -> list[Projection]:
        """The projections whose heads `projection` rotates, each head by itself; none if it rotates no heads.

        Its matrix is smaller than the width of the projections before it, since heads are split off in between.
        """
        size = self.view.dims(projection.matrix.value)
        if size is None or len(size) < 2 or size[-1] != size[-2] or not isinstance(size[-1], int):
            return []
        # This comes first: walking back from each projection to those before it would cross the whole model.
        if not is_rotation(self.view, projection.matrix):
            return []
        data = projection.contracted
        before = self._reach(data.name, data.feature, HEAD_OPS)
        return before if before and all(_columns(self.view, source) > size[-1] for source in before) else []


class _AxisVisit(NamedTuple):
    """A value and one of its axes, on a walk back `through` ops that has `passed` products over other axes."""

    value: str
    axis: int | None
    passed: int
    through: frozenset[str]


def _values(projections: Iterable[Projection]) -> set[str]:
    return {projection.value for projection in projections}


def _depends(view: GraphView, node: NodeProto, source: NodeProto) -> bool:
    limit = view.positions[source.output[0]]

    def before(name: str) -> Sequence[str]:
        return view.producers[name].input if view.positions.get(name, -1) > limit else ()

    return any(name in source.output for name in walk(node.input, before))


def _is_depthwise(view: GraphView, node: NodeProto) -> bool:
    """Whether a Conv filters each channel by itself, as after the projections of Primer: it mixes positions alone."""
    product = product_of(view, node) if "Conv" in node.op_type else None
    dims = view.dims(product.operands[1]) if product is not None and product.operands[1] in view.folded else None
    return dims is not None and dims[1] == 1 and dims[0] != 1


def _columns(view: GraphView, projection: Projection) -> int:
    """How many features a projection makes; 0 if that is not known."""
    dims, axis = view.dims(projection.matrix.value), projection.product.free_axis(projection.side)
    size = dims[axis] if dims is not None and axis is not None and -axis <= len(dims) else 0
    return size if isinstance(size, int) else 0


def _carries(node: NodeProto, value: str) -> bool:
    """Whether `value` is the data output of `node`, not a statistic or a mask."""
    return value == node.output[0] or node.op_type in ("Split", "RotaryEmbedding")


def as_projection(view: GraphView, node: NodeProto) -> Projection | None:
    """`node` as a product of data with a constant matrix; None for another node."""
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
    """Whether the constant is a matrix or a stack of them (torch keeps one per head in an Einsum's weight), or the
    filter of a 1×1 Conv, which mixes channels at each position: all of them, or those of each group."""
    dims = view.dims(matrix.value) or tuple(matrix.stored.dims)
    if "Conv" in node.op_type:
        return side == 1 and len(dims) > 2 and set(dims[2:]) == {1} and dims[1] != 1
    return sum(dim != 1 for dim in dims) > 1


def _other_side(side: Side) -> Side:
    return 0 if side else 1


MOST_PASSED: Final = 2
"""The most products over other axes between attention and a projection: Linformer has one, over positions."""

NORM_OPS: Final = frozenset(
    {
        *("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "LpNormalization"),
        *("Pow", "ReduceMean", "ReduceL2", "Sqrt", "Reciprocal"),
    }
)
"""Ops of a norm, as one op or several. Q and K may have their own norms; a block begins with one too."""

CURVE_OPS: Final = frozenset(
    {
        *("Relu", "LeakyRelu", "PRelu", "Elu", "Selu", "Celu", "Gelu", "Sigmoid", "HardSigmoid", "HardSwish", "Mish"),
        *("Tanh", "Softplus", "Softsign", "Exp", "Erf", "Cos", "Sin", "Abs", "Softmax", "Max", "Min", "Swish"),
    }
)
"""Curves after a projection, such as the feature maps of linear attention."""

HEAD_OPS: Final = frozenset(
    {
        *(*NORM_OPS, *CURVE_OPS, *ARRANGING, "CastLike", "Expand", "Tile"),
        *("Add", "Sub", "Mul", "Div", "Neg", "Concat", "Slice", "Split", "Gather", "GatherND", "Where", "Pad"),
        *("SequenceAt", "SplitToSequence", "ReduceMax", "Clip", "RotaryEmbedding", "Dropout", "BatchNormalization"),
        *("QuantizeLinear", "DequantizeLinear", "ScatterElements", "ScatterND"),
    }
)
"""Ops that may be between a projection and attention: heads, rotary embedding, norms, curves, KV cache."""
