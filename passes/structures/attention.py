"""Find attention, as a pattern or as one operator: softmax(Q·Kᵀ)·V, other weightings, and linear attention.

A softmax may be written with Exp (Reformer). In linear attention nothing is between the two products, which may then
come in either order: (Q·Kᵀ)·V is Q·(Kᵀ·V).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from onnx import NodeProto

from passes.graph.op_facts import ARRANGING, op_of
from passes.structures.axes import Product, Side, inputs_with_axis, join_of, product_of
from passes.structures.candidates import Candidate, find_fused
from passes.structures.projection import Operand, projections_behind
from passes.structures.view import GraphView


def find_attentions(view: GraphView) -> Iterator[Candidate]:
    yield from find_fused(view, FUSED_OPS, inputs=3)
    for softmax in view.by_op.get("Softmax", ()):
        scores = next((up for up in view.upstream(softmax.input[0], BEFORE) if _is_joint(view, up)), None)
        context = next((down for down, _ in view.downstream(softmax.output[0], AFTER) if _is_joint(view, down)), None)
        if scores is not None and context is not None:
            pins = (scores.output[0], softmax.output[0], context.output[0])
            yield Candidate(context, (scores, softmax, context), pins, allow_gaps=True)


def _is_joint(view: GraphView, node: NodeProto) -> bool:
    """Whether a node multiplies two computed values. A product with a constant is a projection, or mixes heads."""
    operands = [name for name in node.input if name]
    return node.op_type in ("MatMul", "Einsum") and len(operands) == 2 and not view.folded.intersection(operands)


FUSED_OPS: Final = (
    "Attention",
    *(f"com.microsoft.{name}" for name in ("Attention", "MultiHeadAttention", "GroupQueryAttention")),
)


@dataclass(frozen=True, slots=True)
class Operands:
    """The values that enter attention as Q, K and V."""

    query: Operand
    key: Operand
    value: Operand


@dataclass(frozen=True, slots=True)
class _Joint:
    """Two products, of which `outer` sums over `axis` of the result of `inner`, its operand on `side`."""

    inner: Product
    axis: int | None
    outer: Product
    side: Side

    @property
    def far(self) -> Side:
        """The operand of `inner` at the other end."""
        return 0 if self.near else 1

    @property
    def near(self) -> Side:
        """The operand of `inner` with the axis that `outer` sums over; the right one if that is not known."""
        sides = self.inner.sources(self.axis)
        return sides[0][0] if len(sides) == 1 else 1

    @property
    def last(self) -> Side:
        """The operand of `outer` that does not come from `inner`."""
        return 0 if self.side else 1

    def as_scores(self) -> Operands:
        """Read `inner` as Q·Kᵀ: K is the operand with the positions that V is summed over."""
        return Operands(
            _summed_operand(self.inner, self.far),
            _summed_operand(self.inner, self.near),
            _passed_operand(self.outer, self.last),
        )

    def as_context(self) -> Operands:
        """Read `inner` as Kᵀ·V: K is the operand with the features that Q is summed over."""
        return Operands(
            _summed_operand(self.outer, self.last),
            _passed_operand(self.inner, self.near),
            _passed_operand(self.inner, self.far),
        )


def attention_operands(view: GraphView) -> Iterator[tuple[Operands, ...]]:
    """For each attention in this graph itself, in order, the possible readings of its operands.

    There are several where scores are a sum: content with content, and content with relative positions.
    """
    found: list[tuple[int, tuple[Operands, ...]]] = []
    taken: set[str] = set()
    own = {node.output[0] for node in view.own if node.output}
    for node in view.own:
        if op_of(node) in ATTENTION_OPS and len(node.input) >= 3 and all(node.input[:3]):
            features = (Operand(name, -1) for name in node.input[:3])
            found.append((view.positions[node.output[0]], (Operands(*features),)))
        elif node.op_type in WEIGHTINGS:
            joints = list(_find_weighted(view, node))
            taken.update(value for joint in joints for value in (joint.inner.value, joint.outer.value))
            readings = tuple(dict.fromkeys(joint.as_scores() for joint in joints))
            if readings:
                found.append((view.positions[node.output[0]], readings))
    for product in _joins(view):
        if product.value in own and product.value not in taken:
            read = (_read_linear(view, joint) for joint in _behind(view, product, taken))
            readings = tuple(operands for operands in read if operands is not None)
            if readings:
                found.append((view.positions[product.value], readings))
    for node in view.own:
        if node.op_type == "Div" and view.folded.isdisjoint(node.input):
            readings = tuple(dict.fromkeys(_find_weighted_values(view, node)))
            if readings:
                found.append((view.positions[node.output[0]], readings))
    for _, readings in sorted(found, key=lambda one: one[0]):
        yield readings


def _find_weighted(view: GraphView, node: NodeProto) -> Iterator[_Joint]:
    """The products before a weighting, each with the product after the weighting that reads the weights."""
    before, after = (BEFORE, AFTER) if node.op_type in SOFTMAXES else (BEFORE - MIXERS, AFTER - MIXERS)

    def ends(one: NodeProto) -> bool:
        return join_of(view, one) is not None

    inner = {maker.output[0] for maker in view.upstream(node.input[0], before, until=ends) if ends(maker)}
    if not inner:
        return
    through = before | after | WEIGHTINGS
    for reader, weights in view.downstream(node.output[0], after, until=ends):
        outer = join_of(view, reader)
        if outer is not None:
            side: Side = 0 if outer.operands[0] == weights else 1
            for product, axis in _trace(view, weights, outer.contracted_axis(side), through):
                if product.value in inner:
                    yield _Joint(product, axis, outer, side)


def _find_weighted_values(view: GraphView, division: NodeProto) -> Iterator[Operands]:
    """Readings of a sum of values, each times a weight made from its key, over the sum of these weights (RWKV, AFT).

    Q lets the quotient through, or the sum of values before the division.
    """
    total = {division.input[1], *(name for node in _summands(view, division.input[1]) for name in node.input)}
    beside = {
        view.other_operand(reader, name)
        for reader, name in view.downstream(division.output[0], AFTER)
        if reader.op_type == "Mul"
    }
    weighted: list[tuple[str, str]] = []
    for node in _summands(view, division.input[0]):
        if node.op_type == "Mul" and view.folded.isdisjoint(node.input):
            inside = [name for name in node.input if name in total]
            outside = [name for name in node.input if name not in total]
            weighted += [(inside[0], outside[0])] if len(inside) == len(outside) == 1 else []
            beside.update(outside if len(outside) == 2 else ())
    for query in sorted(beside, key=lambda name: view.positions.get(name, -1)):
        yield from (Operands(Operand(query, -1), Operand(key, -1), Operand(value, -1)) for key, value in weighted)


def _summands(view: GraphView, name: str) -> Iterator[NodeProto]:
    """The nodes that a sum over positions is made from; a constant matrix on the left mixes positions too."""

    def ends(node: NodeProto) -> bool:
        return node.op_type == "MatMul" and (node.input[0] not in view.folded or node.input[1] in view.folded)

    return view.upstream(name, STATE | {"MatMul"}, until=ends)


def _joins(view: GraphView) -> list[Product]:
    products = (join_of(view, node) for node in view.own)
    return [product for product in products if product is not None]


def _behind(view: GraphView, outer: Product, taken: set[str]) -> Iterator[_Joint]:
    """The products that compute an operand of `outer`, up to a scale, a mask or a norm."""
    for side in _SIDES:
        for inner, axis in _trace(view, outer.operands[side], outer.contracted_axis(side), STATE):
            if inner.value not in taken:
                yield _Joint(inner, axis, outer, side)


def _trace(
    view: GraphView, name: str, axis: int | None, through: frozenset[str]
) -> Iterator[tuple[Product, int | None]]:
    """The products of two computed values that `name` is made from, each with the axis there that becomes `axis`."""
    seen: set[str] = set()
    front = [(name, axis)]
    while front:
        value, axis = front.pop(0)
        node = view.producers.get(value)
        if node is None or node.output[0] in seen or value in view.folded:
            continue
        seen.add(node.output[0])
        join = join_of(view, node)
        product = product_of(view, node)
        if join is not None:
            yield join, axis
        elif product is not None and node.op_type in through:  # heads are mixed
            front.extend((product.operands[side], at) for side, at in product.sources(axis))
            front.extend((operand, None) for operand in product.operands)
        elif node.op_type in through:
            front.extend(inputs_with_axis(view, node, axis))


def _read_linear(view: GraphView, joint: _Joint) -> Operands | None:
    """Read two products with nothing between them by the origin of the axis that the inner one sums over.

    An axis of features is made by a projection: Q·Kᵀ. An axis of positions is one of the data: Kᵀ·V.
    """
    scores, context = joint.as_scores(), joint.as_context()
    summed, dims = joint.inner.contracted_axis(0), view.dims(joint.inner.operands[0])
    is_outer = summed is None or (dims is not None and dims[summed] == 1)
    if not is_outer and all(
        projections_behind(view, Operand(operand.name, operand.feature, operand.feature))
        for operand in (scores.query, scores.key)
    ):
        return scores
    if all(
        projections_behind(view, Operand(operand.name, operand.feature, operand.feature))
        for operand in (context.key, context.value)
    ):
        return context
    return None


def _summed_operand(product: Product, side: Side) -> Operand:
    return Operand(product.operands[side], product.contracted_axis(side), product.free_axis(side))


def _passed_operand(product: Product, side: Side) -> Operand:
    return Operand(product.operands[side], product.free_axis(side), product.contracted_axis(side))


_SIDES: Final[tuple[Side, Side]] = (0, 1)

ATTENTION_OPS: Final = frozenset({"Attention", "com.microsoft.MultiHeadAttention", "com.microsoft.GroupQueryAttention"})
"""Operators whose first three inputs are Q, K and V."""

SOFTMAXES: Final = frozenset({"Softmax", "Exp", "QLinearSoftmax"})

WEIGHTINGS: Final = SOFTMAXES | {"Sigmoid", "HardSigmoid", "Relu", "LeakyRelu", "Softplus", "Elu", "Hardmax"}
"""Ops that turn scores into weights."""

BETWEEN: Final = ARRANGING | {
    *("CastLike", "Expand", "Add", "Sub", "Mul", "Div", "Where", "Dropout", "Split", "Trilu", "Clip"),
    *("QuantizeLinear", "DequantizeLinear", "SplitToSequence", "SequenceAt"),
}
"""Ops that may be between the two products of linear attention: a scale, a mask, a decay, the sum over all keys."""

STATE: Final = BETWEEN | {
    "CumSum",
    "ReduceSum",
    "Concat",
    "Slice",
    "Gather",
    "Neg",
    "Pad",
    "ScatterND",
    "ScatterElements",
}
"""Further ops allowed between the two products: they sum products of keys and values, at once or by steps."""

MIXERS: Final = frozenset({"MatMul", "Einsum"})
"""Products with weights that mix heads, as talking heads do."""

BEFORE: Final = (
    BETWEEN
    | MIXERS
    | {*("Min", "Max", "Clip", "Tanh", "LogSoftmax", "Concat", "Slice", "Pad", "Gather", "GatherElements")}
    | {"ScatterND", "ScatterElements"}
)
"""Ops that may be between Q·Kᵀ and the softmax: scale, mask, bias, soft cap, sinks, talking heads, windows."""

AFTER: Final = BETWEEN | MIXERS | {"Slice", "Pad", "Concat", "Pow"}
"""Ops that may be between the softmax and its product with V."""
