"""Find batch norms, layer norms, RMS norms and group norms, each as one operator; the last three also as several.

In several operators, a layer norm and an RMS norm divide by the root of a mean square. A group norm is an
InstanceNormalization, or such a division, between two Reshapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from onnx import NodeProto

from passes.graph.op_facts import PASSING_OPS, op_of
from passes.structures.axes import axes_of
from passes.structures.candidates import Candidate, find_fused
from passes.structures.matrices import matrix_of, matrix_values
from passes.structures.view import GraphView

BATCH_NORM_OPS: Final = ("BatchNormalization",)
LAYER_NORM_OPS: Final = ("LayerNormalization", "com.microsoft.SkipLayerNormalization")
RMS_NORM_OPS: Final = (
    "RMSNormalization",
    "SimplifiedLayerNormalization",
    "com.microsoft.SkipSimplifiedLayerNormalization",
)
"""onnxruntime's SimplifiedLayerNormalization is an RMS norm, and is in the default domain."""


def find_batch_norms(view: GraphView) -> Iterator[Candidate]:
    """Each BatchNormalization."""
    yield from find_fused(view, BATCH_NORM_OPS)


def find_layer_norms(view: GraphView) -> Iterator[Candidate]:
    """Each LayerNormalization, as one operator or written with mean and variance."""
    yield from find_fused(view, LAYER_NORM_OPS)
    yield from _spelled_out(view, centred=True)


def find_rms_norms(view: GraphView) -> Iterator[Candidate]:
    """Each RMSNormalization, as one operator or written with the mean of squares."""
    yield from find_fused(view, RMS_NORM_OPS)
    yield from _spelled_out(view, centred=False)


def _spelled_out(view: GraphView, *, centred: bool) -> Iterator[Candidate]:
    for norm in find_norm_patterns(view):
        if norm.centred == centred and reshape_back(view, norm.x, norm.last) is None:
            yield Candidate(norm.last, norm.nodes, (norm.quotient, norm.last.output[0]))


@dataclass(frozen=True, slots=True)
class NormPattern:
    """x / √(mean(x²) + ε), where the mean is over the last axes or over the channels; with `centred`, x - mean(x) takes
    the place of x.

    `nodes` begins with the nodes that compute `quotient`, in no fixed order; then come the Mul of the scale
    and the Add of the bias that come after it: readers rely on this split."""

    x: str
    centred: bool
    nodes: tuple[NodeProto, ...]
    quotient: str
    """The result of the division. A scale may come before it or after it, a bias only after it."""

    @property
    def last(self) -> NodeProto:
        return self.nodes[-1]


def find_norm_patterns(view: GraphView) -> Iterator[NormPattern]:
    """Every layer norm and RMS norm that the graph has as several operators."""
    for root in (node for op in ROOTS for node in view.by_op.get(op, ())):
        if root.op_type == "Pow" and view.scalar(root.input[1]) not in (0.5, -0.5):
            continue
        spread = _spread_of_length(view, root) if root.op_type == "ReduceL2" else _spread(view, root.input[0])
        if spread is None:
            continue
        for division in _divisions(view, root, spread):
            ends = scale_and_bias(view, division[-1])
            differences = [node for node in division if node.op_type == "Sub"]
            nodes = dict.fromkeys(node.output[0] for node in (*differences, *spread.nodes, root, *division, *ends))
            producers = tuple(view.producers[name] for name in nodes if name not in {end.output[0] for end in ends})
            yield NormPattern(spread.x, spread.centred, (*producers, *ends), division[-1].output[0])


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean square of x, or with `centred` of x - mean(x), and the nodes that compute it.

    A ReduceL2 is the root of a sum, not of a mean: `size` is then the number of elements, and a factor 1 / √size has to
    follow. Otherwise `size` is 1.
    """

    x: str
    centred: bool
    nodes: tuple[NodeProto, ...]
    size: int = 1


def _spread(view: GraphView, name: str) -> Spread | None:
    """The mean square from which at most `MOST_BETWEEN` operators of `SCALARS` make `name`; None for another value.

    The number that is added and the factor of a mean are not checked. The factor of a sum has to divide it by the
    number of elements.
    """
    nodes: list[NodeProto] = []
    divisor = 1.0
    for _ in range(MOST_BETWEEN):
        node = _producer(view, name)
        if node is None:
            return None
        if node.op_type in ("ReduceMean", "ReduceSum", "ReduceSumSquare"):
            return _mean_square(view, node, nodes, divisor)
        if node.op_type == "Sub":
            return _difference_of_moments(view, node, nodes)
        data = [operand for operand in node.input if operand and operand not in view.folded]
        if node.op_type not in SCALARS or len(data) != 1 or (node.op_type == "Div" and data[0] != node.input[0]):
            return None
        if node.op_type in ("Mul", "Div"):
            divisor *= _divisor(view, node)
        nodes.insert(0, node)
        name = data[0]
    return None


def _divisor(view: GraphView, node: NodeProto) -> float:
    """The divisor of a Mul or Div by a constant; 0 where the divisor is computed, for example from sizes."""
    constant = next(name for name in node.input if name in view.folded)
    number = view.scalar(constant)
    if number is None or number == 0.0:
        return 0.0
    return number if node.op_type == "Div" else 1.0 / number


def _mean_square(view: GraphView, mean: NodeProto, after: list[NodeProto], divisor: float) -> Spread | None:
    """The mean of a square, or the sum of a square that is divided by the number of elements, by one less (an unbiased
    variance), or by a number that the graph computes.
    """
    square = mean if mean.op_type == "ReduceSumSquare" else view.find_producer(mean.input[0], "Mul", "Pow")
    if square is None or not _is_over_features(view, mean):
        return None
    if mean.op_type != "ReduceMean":
        size = _reduced_size(view, mean)
        is_other = divisor and size and not _divides_by_size(divisor, size)
        if divisor == 1.0 or is_other:
            return None
    if square is not mean and not _is_square(view, square):
        return None
    base = view.source(square.input[0])
    x, differences = _without_mean(view, base)
    inner = (square, mean) if square is not mean else (mean,)
    return Spread(x if differences else base, bool(differences), (*differences, *inner, *after))


def _is_square(view: GraphView, node: NodeProto) -> bool:
    if node.op_type == "Mul":
        return view.source(node.input[0]) == view.source(node.input[1])
    return node.op_type == "Pow" and view.scalar(node.input[1]) == 2.0


def _difference_of_moments(view: GraphView, node: NodeProto, after: list[NodeProto]) -> Spread | None:
    """E[x²] - E[x]²."""
    of_square, square = _spread(view, node.input[0]), _producer(view, node.input[1])
    if of_square is None or of_square.centred or square is None or not _is_square(view, square):
        return None
    mean = _mean_of(view, square.input[0])
    if mean is None or mean[0] != of_square.x:
        return None
    return Spread(of_square.x, True, (*of_square.nodes, *mean[1], square, node, *after))


def _spread_of_length(view: GraphView, root: NodeProto) -> Spread | None:
    """ReduceL2 of x over its features: the root of a sum of squares."""
    size = _reduced_size(view, root)
    return Spread(view.source(root.input[0]), False, (), size) if size and _is_over_features(view, root) else None


def _reduced_size(view: GraphView, node: NodeProto) -> int:
    """How many elements a reduction takes together; 0 if that is not known."""
    dims, axes = view.dims(node.input[0]), axes_of(view, node)
    sizes = [dims[axis] for axis in axes if -len(dims) <= axis < len(dims)] if dims is not None else []
    return math.prod(int(size) for size in sizes) if sizes and all(isinstance(size, int) for size in sizes) else 0


def _divides_by_size(divisor: float, size: int) -> bool:
    return any(math.isclose(divisor, wanted, rel_tol=1e-3) for wanted in (size, size - 1))


def _producer(view: GraphView, name: str) -> NodeProto | None:
    """The node that makes a mean or a root, before the operators that only give it another shape or type."""
    return view.producers.get(view.origin_of(name, STATISTIC_OPS, pairs=True))


def _mean_of(view: GraphView, name: str) -> tuple[str, tuple[NodeProto, ...]] | None:
    """The x of which `name` is the mean over its features, with the nodes that compute that."""
    node = _producer(view, name)
    last: tuple[NodeProto, ...] = ()
    if node is not None and node.op_type in ("Div", "Mul") and not view.folded.isdisjoint(node.input):
        # A sum divided by the number of elements, as torch's var_mean is exported.
        divisor = _divisor(view, node)
        data = next((operand for operand in node.input if operand not in view.folded), None)
        last, node = (node,), None if data is None else _producer(view, data)
        if node is None or node.op_type != "ReduceSum":
            return None
        size = _reduced_size(view, node)
        if divisor and size and not math.isclose(divisor, size, rel_tol=1e-3):
            return None
    if node is None or node.op_type != ("ReduceSum" if last else "ReduceMean") or not _is_over_features(view, node):
        return None
    return view.source(node.input[0]), (node, *last)


def _divisions(view: GraphView, root: NodeProto, spread: Spread) -> Iterator[list[NodeProto]]:
    """The nodes that divide x, or x - mean(x), by a root: Div, or Reciprocal and Mul; after Pow(-½), which has divided
    already, just Mul.

    ε may be added to the root in place of the mean square, and x may be multiplied by the scale before it is divided.
    """
    if root.op_type == "Pow" and view.scalar(root.input[1]) == -0.5:
        yield from _products_with(view, root.output[0], [], spread)
        return
    for name, between in _adjusted_roots(view, root.output[0]):
        scaled = math.prod(_divisor(view, node) for node in between if node.op_type in ("Mul", "Div"))
        for node in _consumers(view, name, "Div"):
            numerator = _numerator(view, node.input[0], spread) if _reads(view, node.input[1], name) else None
            if numerator is not None:
                if scaled == 1.0:
                    after = _root_of_size(view, node, spread.size)
                else:
                    after = [] if math.isclose(scaled**2, spread.size, rel_tol=1e-3) else None
                if after is not None:
                    yield [*numerator, *between, node, *after]
            elif view.scalar(node.input[0]) == 1.0 and spread.size == 1:
                yield from _products_with(view, node.output[0], [*between, node], spread)
        for node in _consumers(view, name, "Reciprocal") if spread.size == 1 else ():
            yield from _products_with(view, node.output[0], [*between, node], spread)


def _root_of_size(view: GraphView, quotient: NodeProto, size: int) -> list[NodeProto] | None:
    """The Mul by √n that makes a norm of x / length(x), where n is the number of elements.

    Empty where the root is that of a mean already, None where the Mul is missing.
    """
    if size == 1:
        return []
    for node in view.find_consumers(quotient.output[0], "Mul"):
        numbers = [number for number in map(view.scalar, node.input) if number is not None]
        if numbers and math.isclose(numbers[0] ** 2, size, rel_tol=1e-2):
            return [node]
    return None


def _adjusted_roots(view: GraphView, name: str) -> Iterator[tuple[str, list[NodeProto]]]:
    """`name`, and the values made from it by an added number, a bound or a factor; each with the nodes between."""
    front: list[tuple[str, list[NodeProto]]] = [(name, [])]
    for value, nodes in front:  # which grows meanwhile
        yield value, nodes
        if len(nodes) < 2:
            for node in _consumers(view, value, *SCALARS):
                if sum(operand not in view.folded for operand in node.input if operand) == 1 and (
                    node.op_type != "Div" or _reads(view, node.input[0], value)
                ):
                    front.append((node.output[0], [*nodes, node]))


def _consumers(view: GraphView, name: str, *ops: str) -> list[NodeProto]:
    """The consumers of a statistic that are one of `ops`."""
    consumers = []
    for node in view.find_consumers(name):
        if node.op_type in STATISTIC_OPS and node.input[0] == name:
            consumers += _consumers(view, node.output[0], *ops)
        elif op_of(node) in ops:
            consumers.append(node)
    return consumers


def _reads(view: GraphView, read: str, name: str) -> bool:
    """Whether `read` and `name` are one value, apart from layout and type."""
    return view.origin_of(read, STATISTIC_OPS, pairs=True) == view.origin_of(name, STATISTIC_OPS, pairs=True)


def _products_with(view: GraphView, inverse: str, before: list[NodeProto], spread: Spread) -> Iterator[list[NodeProto]]:
    for node in _consumers(view, inverse, "Mul"):
        for name in node.input:
            numerator = None if _reads(view, name, inverse) else _numerator(view, name, spread)
            if numerator is not None:
                yield [*numerator, *before, node]


def _numerator(view: GraphView, name: str, spread: Spread) -> list[NodeProto] | None:
    """The nodes that make x - mean(x), or none for x itself, from x; with a scale where that comes first.

    None for another value.
    """
    scale = view.find_producer(name, "Mul")
    weights = [] if scale is None else [operand for operand in scale.input if operand in view.folded]
    if scale is not None and len(weights) == 1 and view.source(name) != spread.x:
        inner = _numerator(view, view.other_operand(scale, view.source(weights[0])), spread)
        if inner is not None:
            return [*inner, scale]
    if not spread.centred:
        return [] if view.source(name) == spread.x else None
    x, differences = _without_mean(view, name)
    return differences if differences and x == spread.x else None


def _without_mean(view: GraphView, name: str) -> tuple[str, list[NodeProto]]:
    """If `name` is x - mean(x), x and the nodes of the difference; otherwise `name` and no nodes."""
    difference = view.find_producer(name, "Sub")
    mean = _mean_of(view, difference.input[1]) if difference is not None else None
    if difference is None or mean is None or view.source(difference.input[0]) != mean[0]:
        return name, []
    return mean[0], [*mean[1], difference]


def scale_and_bias(view: GraphView, last: NodeProto) -> list[NodeProto]:
    """The Mul by a constant of several elements after `last`, and then the Add of such a constant; either may be
    missing.

    Each has to be the only consumer of the value before it.
    """
    ends = []
    for op in ("Mul", "Add"):
        consumers = view.find_consumers(last.output[0])
        if len(consumers) != 1 or consumers[0].op_type != op:
            continue
        node = consumers[0]
        if not any(name in view.folded and view.scalar(name) is None for name in node.input):
            continue
        ends.append(node)
        last = node
    return ends


def reshape_back(view: GraphView, x: str, last: NodeProto) -> NodeProto | None:
    """The Reshape that turns groups back into channels after the `last` node of a norm, where a Reshape before `x` made
    the groups.

    Axis 1 of `x` has fewer elements than there are channels. None for a norm that is no group norm.
    """
    into, consumers = view.find_producer(x, "Reshape"), view.find_consumers(last.output[0])
    if into is None or len(consumers) != 1 or consumers[0].op_type != "Reshape":
        return None
    before, after, matrix = view.dims(into.input[0]), view.dims(consumers[0].output[0]), matrix_of(view, into.input[1])
    sizes = None if matrix is None else matrix_values(view, matrix)
    if before is None or before != after or len(before) < 2:
        return None
    channels, count = before[1], sizes[1] if sizes is not None and sizes.size > 1 else (view.dims(x) or ("", ""))[1]
    if not isinstance(channels, int) or isinstance(count, str) or count < 1:
        return None
    return consumers[0] if count < channels and channels % count == 0 else None


ROOTS: Final = ("Sqrt", "Pow", "ReduceL2")

SCALARS: Final = ("Add", "Mul", "Div", "Max", "Clip")
"""Operators that may change a mean square, or its root, by a constant: they add ε, keep it above a bound, or divide by
the number of elements."""

STATISTIC_OPS: Final = PASSING_OPS | {"Expand"}
"""Operators that may stand between a mean and its consumer: torch puts the axis back that a mean removed, and
expands."""

MOST_BETWEEN: Final = 5
"""The most nodes between a root and its mean square."""


def _is_over_features(view: GraphView, mean: NodeProto) -> bool:
    """Whether the mean is over the last axes, or over axis 1, the channels of an image; but not over height and width,
    as in an instance norm."""
    axes = axes_of(view, mean)
    dims = view.dims(mean.input[0])
    if not axes:
        return False
    rank = len(dims) if dims is not None else None
    placed = {axis - rank if rank is not None and axis >= 0 else axis for axis in axes}
    if rank == 4 and placed == {-1, -2}:  # each channel of an image by itself
        return False
    return placed == set(range(-len(placed), 0)) or (rank == 4 and placed == {-3}) or axes == [1]


GROUP_NORM_OPS: Final = ("GroupNormalization", "com.microsoft.GroupNorm", "com.microsoft.SkipGroupNorm")


def find_group_norms(view: GraphView) -> Iterator[Candidate]:
    """Each GroupNormalization, as one operator or written with reshapes and another norm."""
    yield from find_fused(view, GROUP_NORM_OPS)
    for node in view.by_op.get("InstanceNormalization", ()):
        yield from _between_reshapes(view, node.input[0], (node,))
    for norm in find_norm_patterns(view):
        if norm.centred:
            yield from _between_reshapes(view, norm.x, norm.nodes)


def _between_reshapes(view: GraphView, x: str, norm: tuple[NodeProto, ...]) -> Iterator[Candidate]:
    back = reshape_back(view, x, norm[-1])
    if back is not None:
        nodes = (*norm, *scale_and_bias(view, back))
        yield Candidate(nodes[-1], nodes, (norm[-1].output[0], nodes[-1].output[0]))
