"""Find attention, as a pattern or as one operator: softmax(Q·Kᵀ)·V, other weightings, and linear attention.

A softmax may be written with Exp (Reformer). In linear attention nothing is between the two products, which may then
come in either order: (Q·Kᵀ)·V is Q·(Kᵀ·V).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Set
from dataclasses import dataclass, replace
from typing import Final

from onnx import NodeProto

from passes.graph.op_facts import ARRANGING, op_of
from passes.graph.traversal import NearestSources
from passes.structures.axes import SIDES, Product, Side, inputs_with_axis, join_of, product_of
from passes.structures.candidates import Candidate, find_fused
from passes.structures.projection import Operand, ProjectionSearch
from passes.structures.view import GraphView, carried_inputs


def find_attentions(view: GraphView) -> Iterator[Candidate]:
    """Each attention, as one operator or as Softmax, perhaps written with Exp, between two products of computed
    values."""
    yield from find_fused(view, FUSED_OPS, inputs=3)
    for op, mixers in (("Exp", MIXERS), ("Softmax", frozenset[str]())):
        for softmax in view.by_op.get(op, ()):
            before = view.upstream(softmax.input[0], BEFORE - mixers)
            after = view.downstream(softmax.output[0], AFTER - mixers)
            scores = next((up for up in before if _is_joint(view, up)), None)
            context = next((down for down, _ in after if _is_joint(view, down)), None)
            if scores is not None and context is not None and (op != "Exp" or _has_sum(view, softmax)):
                pins = (scores.output[0], softmax.output[0], context.output[0])
                yield Candidate(context, (scores, softmax, context), pins, allow_gaps=True)


def _has_sum(view: GraphView, exponential: NodeProto) -> bool:
    """Whether a sum divides the results of an Exp, or its logarithm is subtracted from what the Exp reads."""
    after = (node for node, _ in view.downstream(exponential.output[0], AFTER - MIXERS))
    before = view.upstream(exponential.input[0], BEFORE - MIXERS)
    return any(node.op_type == "ReduceSum" for node in after) or any(node.op_type in LOGARITHMS for node in before)


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
class _Inner:
    """A product of two computed values, and the `axis` of its result that another product sums over."""

    product: Product
    axis: int | None

    @property
    def near(self) -> Side:
        """The operand with the axis that the other product sums over; the right one if that is not known."""
        sides = self.product.sources(self.axis)
        return sides[0][0] if len(sides) == 1 else 1

    @property
    def far(self) -> Side:
        """The operand at the other end."""
        return 0 if self.near else 1

    def as_scores(self) -> tuple[Operand, Operand]:
        """Q and K of Q·Kᵀ: K is the operand with the positions that V is summed over."""
        return _summed_operand(self.product, self.far), _summed_operand(self.product, self.near)

    def as_context(self) -> tuple[Operand, Operand]:
        """K and V of Kᵀ·V: K is the operand with the features that Q is summed over."""
        return _passed_operand(self.product, self.near), _passed_operand(self.product, self.far)


@dataclass(frozen=True, slots=True)
class _Joint:
    """`outer` sums over an axis of the result of `inner`, its operand on `side`."""

    inner: _Inner
    outer: Product
    side: Side

    def as_scores(self) -> Operands:
        return Operands(*self.inner.as_scores(), _passed_operand(self.outer, 0 if self.side else 1))

    def as_context(self) -> Operands:
        return Operands(_summed_operand(self.outer, 0 if self.side else 1), *self.inner.as_context())


_ValueAxis = tuple[str, int | None]


def attention_operands(search: ProjectionSearch) -> Iterator[tuple[Operands, ...]]:
    """For each attention in this graph itself, in order, the possible readings of its operands.

    There are several where scores are a sum: content with content, and content with relative positions. Of readings
    whose Q and K, or K and V, come from the same projections, as in all earlier steps of a recurrence, there is one.
    """
    view = search.view
    softmaxes, curves = (
        _WeightedProducts(search, before, after)
        for before, after in ((BEFORE, AFTER), (BEFORE - MIXERS, AFTER - MIXERS))
    )
    found: list[tuple[int, tuple[Operands, ...]]] = []
    taken: set[str] = set()

    def note(value: str, readings: Iterable[Operands]) -> None:
        distinct = tuple(dict.fromkeys(readings))
        found.extend([(view.positions[value], distinct)] if distinct else [])

    own = {node.output[0] for node in view.own if node.output}
    for node in view.own:
        if op_of(node) in ATTENTION_OPS and len(node.input) >= 3 and all(node.input[:3]):
            features = (Operand(name, -1) for name in node.input[:3])
            note(node.output[0], [Operands(*features)])
        elif node.op_type in WEIGHTINGS:
            joints = (softmaxes if node.op_type in SOFTMAXES else curves).around(node)
            taken.update(value for joint in joints for value in (joint.inner.product.value, joint.outer.value))
            note(node.output[0], (joint.as_scores() for joint in joints))
    states = _StateProducts(search, taken)
    for product in _joins(view):
        if product.value in own and product.value not in taken:
            note(product.value, states.read(product))
    for node in view.own:
        if node.op_type == "Div" and view.folded.isdisjoint(node.input):
            note(node.output[0], _find_weighted_values(view, node))
    for _, readings in sorted(found, key=lambda entry: entry[0]):
        yield readings


class _WeightedProducts:
    """The products around a weighting such as Softmax; `before` and `after` are the ops that may be between."""

    def __init__(self, search: ProjectionSearch, before: frozenset[str], after: frozenset[str]) -> None:
        self._search, self._view = search, search.view
        self._before, self._after, self._through = before, after, before | after | WEIGHTINGS
        self._scores: NearestSources[str, Hashable] = NearestSources(self._expand_scores)
        self._contexts: NearestSources[str, tuple[Product, str]] = NearestSources(self._expand_contexts)
        self._inner: NearestSources[_ValueAxis, _Inner] = NearestSources(self._expand_inner)

    def around(self, node: NodeProto) -> list[_Joint]:
        """The products before a weighting, each with the product after the weighting that reads the weights."""
        scores = set(self._scores.of(node.input[0]))
        joints = []
        for outer, weights in self._contexts.of(node.output[0]) if scores else ():
            side: Side = 0 if outer.operands[0] == weights else 1
            inner = self._inner.of((weights, outer.contracted_axis(side)))
            joints += [_Joint(entry, outer, side) for entry in inner if self._key(entry.product) in scores]
        return joints

    def _key(self, product: Product) -> Hashable:
        """Equal for products of values that the same projections make."""
        made = [self._search.projections_of(_summed_operand(product, side)) for side in SIDES]
        if not all(made):
            return product.value
        return tuple(tuple(projection.value for projection in projections) for projections in made)

    def _expand_scores(self, value: str) -> tuple[dict[Hashable, Hashable], list[str]]:
        node = self._view.producers.get(value)
        join = None if node is None else join_of(self._view, node)
        if join is not None:
            key = self._key(join)
            return {key: key}, []
        return {}, carried_inputs(node) if node is not None and node.op_type in self._before else []

    def _expand_contexts(self, value: str) -> tuple[dict[Hashable, tuple[Product, str]], list[str]]:
        products: dict[Hashable, tuple[Product, str]] = {}
        after: list[str] = []
        for node in self._view.consumers.get(value, ()):
            join = join_of(self._view, node)
            if join is not None:
                products[join.value] = join, value
            elif node.op_type in self._after:
                after += [name for name in node.output if name]
        return products, after

    def _expand_inner(self, value_axis: _ValueAxis) -> tuple[dict[Hashable, _Inner], list[_ValueAxis]]:
        join, before = _step_back(self._view, *value_axis, self._through)
        return {self._key(join): _Inner(join, value_axis[1])} if join is not None else {}, before


class _StateProducts:
    """The products that compute an operand of another product, up to a scale, a mask or a norm: linear attention.

    Args:
        taken: products that are part of an attention already.
    """

    def __init__(self, search: ProjectionSearch, taken: Set[str]) -> None:
        self._search, self._taken = search, taken
        self._inner: NearestSources[_ValueAxis, tuple[bool, _Inner]] = NearestSources(self._expand)

    def read(self, outer: Product) -> Iterator[Operands]:
        """The readings of `outer` with the products that compute its operands."""
        for side in SIDES:
            for is_scores, inner in self._inner.of((outer.operands[side], outer.contracted_axis(side))):
                joint = _Joint(inner, outer, side)
                yield joint.as_scores() if is_scores else joint.as_context()

    def _expand(self, value_axis: _ValueAxis) -> tuple[dict[Hashable, tuple[bool, _Inner]], list[_ValueAxis]]:
        join, before = _step_back(self._search.view, *value_axis, STATE)
        if join is None or join.value in self._taken:
            return {}, before
        inner = _Inner(join, value_axis[1])
        made = self._find_projections(inner)
        return {made: (made[0] == "scores", inner)} if made is not None else {}, before

    def _find_projections(self, inner: _Inner) -> tuple[Hashable, ...] | None:
        """The projections of the two operands of `inner`, and which ones the operands are; None if there are none.

        An axis of features is made by a projection: Q·Kᵀ. An axis of positions is one of the data: Kᵀ·V.
        """
        summed, dims = inner.product.contracted_axis(0), self._search.view.dims(inner.product.operands[0])
        is_outer = summed is None or (dims is not None and dims[summed] == 1)
        for reading, operands in (("scores", inner.as_scores()), ("context", inner.as_context())):
            features = [replace(operand, other=operand.feature) for operand in operands]
            made = (
                [self._search.projections_of(operand) for operand in features]
                if reading != "scores" or not is_outer
                else []
            )
            if made and all(made):
                return reading, *(tuple(projection.value for projection in projections) for projections in made)
        return None


def _step_back(
    view: GraphView, value: str, axis: int | None, through: frozenset[str]
) -> tuple[Product | None, list[_ValueAxis]]:
    """The product of two computed values that makes `value`; or else what `value` is made from, each with the axis
    there that becomes `axis`."""
    node = view.producers.get(value)
    if node is None or value in view.folded:
        return None, []
    join = join_of(view, node)
    if join is not None or node.op_type not in through:
        return join, []
    product = product_of(view, node)
    if product is None:
        return None, list(inputs_with_axis(view, node, axis))
    operands = dict.fromkeys(product.operands)  # heads are mixed
    return None, list((operands | {product.operands[side]: at for side, at in product.sources(axis)}).items())


def _find_weighted_values(view: GraphView, division: NodeProto) -> Iterator[Operands]:
    """Readings of a sum of values, each times a weight made from its key, over the sum of these weights (RWKV, AFT).

    Q lets the quotient through, or the sum of values before the division.
    """
    products = [node for node in _summands(view, division.input[0]) if node.op_type == "Mul"]
    products = [node for node in products if view.folded.isdisjoint(node.input)]
    if not products:  # a norm, say; the walks below pass through most of a model
        return
    total = {division.input[1], *(name for node in _summands(view, division.input[1]) for name in node.input)}
    queries: set[str] = set()
    weighted: list[tuple[str, str]] = []
    for node in products:
        inside = [name for name in node.input if name in total]
        outside = [name for name in node.input if name not in total]
        weighted += [(inside[0], outside[0])] if len(inside) == len(outside) == 1 else []
        queries.update(outside if len(outside) == 2 else ())
    if not weighted:
        return
    queries.update(
        view.other_operand(consumer, name)
        for consumer, name in view.downstream(division.output[0], AFTER)
        if consumer.op_type == "Mul"
    )
    for query in sorted(queries, key=lambda name: view.positions.get(name, -1)):
        yield from (Operands(Operand(query, -1), Operand(key, -1), Operand(value, -1)) for key, value in weighted)


def _summands(view: GraphView, name: str) -> Iterator[NodeProto]:
    """The nodes that a sum over positions is made from; a constant matrix on the left mixes positions too."""

    def ends(node: NodeProto) -> bool:
        return node.op_type == "MatMul" and (node.input[0] not in view.folded or node.input[1] in view.folded)

    return view.upstream(name, STATE | {"MatMul"}, until=ends)


def _joins(view: GraphView) -> list[Product]:
    products = (join_of(view, node) for node in view.own)
    return [product for product in products if product is not None]


def _summed_operand(product: Product, side: Side) -> Operand:
    return Operand(product.operands[side], product.contracted_axis(side), product.free_axis(side))


def _passed_operand(product: Product, side: Side) -> Operand:
    return Operand(product.operands[side], product.free_axis(side), product.contracted_axis(side))


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
    *("CumSum", "ReduceSum", "Concat", "Slice", "Gather", "Neg", "Pad", "ScatterND", "ScatterElements")
}
"""Further ops allowed between the two products: they sum products of keys and values, at once or by steps."""

LOGARITHMS: Final = frozenset({"Log", "ReduceLogSum", "ReduceLogSumExp", "LogSoftmax"})

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
