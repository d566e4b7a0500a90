"""Find batch norms, layer norms, RMS norms and group norms, each as one operator; the last three also as several.

In several operators, a layer norm and an RMS norm are known by their elements, in any spelling with the root of a mean
square. A group norm is an InstanceNormalization, or such a norm, between two Reshapes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
from onnx import NodeProto

from passes.graph.op_facts import PASSING_OPS, SAME_OPS
from passes.structures.axes import axes_of
from passes.structures.candidates import Candidate, find_fused
from passes.structures.matrices import matrix_of, matrix_values
from passes.structures.samples import FUNCTIONS, REDUCTIONS, Sample, candidates_before, is_size
from passes.structures.view import DEQUANTIZE, QUANTIZE, GraphView
from passes.weights.stand_ins import Array

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


def find_norm_patterns(view: GraphView) -> Sequence[NormPattern]:
    """Every layer norm and RMS norm that the graph has as several operators; looked for once in a view."""
    if PATTERNS not in view.noted:
        view.noted[PATTERNS] = tuple(_find_norm_patterns(view))
    return view.noted[PATTERNS]


PATTERNS: Final = "norms in several operators"


def _find_norm_patterns(view: GraphView) -> Iterator[NormPattern]:
    for root in (node for op in ROOTS for node in view.by_op.get(op, ())):
        if root.op_type != "Pow" or view.scalar(root.input[1]) in (0.5, -0.5):
            yield from _norms_at(view, root)


def _norms_at(view: GraphView, root: NodeProto) -> Iterator[NormPattern]:
    """The norms that divide by the result of `root`: there are several where data is divided twice."""
    start = root.output[0] if root.op_type in REDUCTIONS else root.input[0]
    before = islice(view.upstream(start, THROUGH), MOST_VALUES)
    reduction = next((node for node in before if node.op_type in REDUCTIONS), None)
    if reduction is None or not _is_over_features(view, reduction):
        return
    size, axes = _reduced_size(view, reduction), _reduced_axes(view, reduction)

    def reduces(node: NodeProto) -> bool:
        return _reduced_axes(view, node) == axes and _reduced_size(view, node) == size

    def sample(x: str, rows: Array, weigh: Callable[[str], Array]) -> Sample:
        return Sample(view, {x: rows}, STATISTIC_OPS - SAME_OPS, reduces, size or rows.shape[1], weigh)

    sources = islice(candidates_before(view, start, THROUGH), MOST_VALUES)
    samples = {x: sample(x, ROWS, lambda _: np.ones(())) for x in sources}
    quotients: set[str] = set()
    after = view.downstream(root.output[0], THROUGH, until=lambda node: node.output[0] in quotients)
    for node, _ in islice(after, MOST_VALUES):
        found = _norm_of(node.output[0], samples, size) if node.op_type in ("Mul", "Div", "Add", "Sub") else None
        if found is not None and _is_odd(sample(found[0], PAIRS, _draw_weight).of(node.output[0]), centred=found[1]):
            quotients.add(node.output[0])
            x, centred = found
            nodes = samples[x].nodes_of(node.output[0])
            pattern = NormPattern(x, centred, (*nodes, *_ends_of(view, nodes)), node.output[0])
            if not _is_over_image(view, reduction) or reshape_back(view, x, pattern.last) is not None:
                yield pattern


def _norm_of(name: str, samples: Mapping[str, Sample], size: int) -> tuple[str, bool] | None:
    """The nearest value x of which `name` is a norm, and whether the norm subtracts the mean of x; None for no norm.

    An RMS norm of x - mean(x) is a layer norm of x.
    """
    distance = ""
    for x, sample in samples.items():
        elements = sample.of(name)
        if elements is None:
            continue
        if _is_near(elements, _norm(ROWS - _mean(ROWS)), size):
            inner = sample.of(distance) if distance else None
            if not distance or (inner is not None and np.allclose(inner, ROWS - _mean(ROWS))):
                return x, True
        elif not distance and _is_near(elements, _norm(ROWS), size):
            distance = x
    return (distance, False) if distance else None


def _is_near(elements: Array, norm: Array, size: int) -> bool:
    """Whether the elements are those of a norm up to a sum and to the factor of an unbiased variance."""
    if elements.shape != norm.shape or not np.isfinite(elements).all():
        return False
    slope = ((norm - norm.mean()) * elements).mean() / norm.var()
    start = elements.mean() - slope * norm.mean()
    if not np.allclose(elements, slope * norm + start, rtol=NEARLY, atol=NEARLY):
        return False
    if size == 0:  # which is not known: then a sum may be divided by any number
        return not math.isclose(slope * slope * norm.shape[1], 1, rel_tol=NEARLY)
    return any(math.isclose(slope * slope, wanted, rel_tol=NEARLY) for wanted in (1, (size - 1) / size))


def _is_odd(elements: Array | None, *, centred: bool) -> bool:
    """Whether the elements of `PAIRS`, with weights of any size, are a norm times one factor for each column, plus one
    sum for each: a row and its negative then have opposite norms, whichever ε is added."""
    if elements is None or elements.shape != PAIRS.shape or not np.isfinite(elements).all():
        return False
    upper, lower = np.split(elements, 2)
    odd, even = (upper - lower) / 2, (upper + lower) / 2
    room = np.abs(odd).max()
    rows = PAIRS[len(LENGTHS) - MOST_LARGE : len(LENGTHS)]
    norm, large = _norm(rows - _mean(rows) if centred else rows), odd[-MOST_LARGE:]
    factors = (norm * large).sum(0) / (norm * norm).sum(0)
    return np.allclose(even, even[-1], rtol=0, atol=1e-4 * room) and np.allclose(
        large, factors * norm, rtol=NEARLY, atol=NEARLY * room
    )


def _draw_weight(name: str) -> Array:
    """Elements of a stored weight, which differ from those of other weights."""
    draw = np.random.default_rng(zlib.crc32(name.encode()))
    return draw.uniform(0.5, 2.0, ROWS.shape[1]) * draw.choice((-1.0, 1.0), ROWS.shape[1])


def _mean(rows: Array) -> Array:
    return rows.mean(-1, keepdims=True)


def _norm(rows: Array) -> Array:
    return rows / np.sqrt(_mean(rows * rows))


def _reduced_size(view: GraphView, node: NodeProto) -> int:
    """How many elements a reduction takes together; 0 if that is not known."""
    dims, axes = view.dims(node.input[0]), axes_of(view, node)
    sizes = [dims[axis] for axis in axes if -len(dims) <= axis < len(dims)] if dims is not None else []
    return math.prod(int(size) for size in sizes) if sizes and all(isinstance(size, int) for size in sizes) else 0


def _ends_of(view: GraphView, nodes: Sequence[NodeProto]) -> list[NodeProto]:
    """The Mul of the scale and the Add of the bias after the last of `nodes`, but for what the nodes have already."""
    weighed = {node.op_type for node in nodes if _has_weight(view, node)}
    return [] if "Add" in weighed else scale_and_bias(view, nodes[-1], ("Add",) if "Mul" in weighed else ("Mul", "Add"))


def _has_weight(view: GraphView, node: NodeProto) -> bool:
    return any(name in view.folded and view.scalar(name) is None and not is_size(view, name) for name in node.input)


def scale_and_bias(view: GraphView, last: NodeProto, ops: Sequence[str] = ("Mul", "Add")) -> list[NodeProto]:
    """The Mul by a constant of several elements after `last`, and then the Add of such a constant; either may be
    missing. `ops` are the operators that are looked for.

    Each has to be the only consumer of the value before it.
    """
    ends = []
    for op in ops:
        consumers = view.find_consumers(last.output[0])
        if len(consumers) != 1 or consumers[0].op_type != op:
            continue
        node = consumers[0]
        if not _has_weight(view, node):
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
    if before is None or before != after or len(before) < 2 or (view.dims(x) or before)[0] != before[0]:
        return None
    channels, count = before[1], sizes[1] if sizes is not None and sizes.size > 1 else (view.dims(x) or ("", ""))[1]
    if not isinstance(channels, int) or isinstance(count, str) or count < 1:
        return None
    return consumers[0] if count < channels and channels % count == 0 else None


ROOTS: Final = ("Sqrt", "Pow", "ReduceL2")

STATISTIC_OPS: Final = PASSING_OPS | {"Expand"}
"""Operators that may stand between a mean and its consumer: torch puts the axis back that a mean removed, and
expands."""

THROUGH: Final = STATISTIC_OPS | FUNCTIONS.keys() | REDUCTIONS.keys() | {QUANTIZE, DEQUANTIZE}

MOST_VALUES: Final = 16
"""The most values before a root, and after it, between which a norm is looked for."""

NEARLY: Final = 1e-2
"""Constants such as the root of a size may have been rounded to bfloat16."""

_DRAW: Final = np.random.default_rng(0).standard_normal((6, 33))
ROWS: Final = 1e3 * (_DRAW[:, 1:] * np.arange(1, 7)[:, None] + 4 * _DRAW[:, :1])
"""Samples of what a norm divides: rows of other means and lengths, so large that no ε counts."""

LENGTHS: Final = (1e-1, 1.0, 10.0, 1e3, 2e3, 4e3, 1e4)
MOST_LARGE: Final = 4
"""So many of the `LENGTHS` are so large that no ε counts."""

_ROWS: Final = np.random.default_rng(1).standard_normal((len(LENGTHS), 33))
_UPPER: Final = np.array(LENGTHS)[:, None] * (_ROWS[:, 1:] + 2 * _ROWS[:, :1])
PAIRS: Final = np.concatenate([_UPPER, -_UPPER])
"""Rows of other lengths, and the negative of each: a number that is added to x counts in some of them."""


def _is_over_features(view: GraphView, reduction: NodeProto) -> bool:
    """Whether a reduction is over the last axes, or over a single axis that is not the first, as channels are."""
    placed, rank = _reduced_axes(view, reduction)
    if len(placed) == 1:
        return rank == 1 or (-rank not in placed if rank else placed <= {-1, 1})
    return bool(placed) and placed == set(range(-len(placed), 0))


def _is_over_image(view: GraphView, reduction: NodeProto) -> bool:
    """Whether a reduction is over height and width, as in an instance norm."""
    return _reduced_axes(view, reduction) == ({-1, -2}, 4)


def _reduced_axes(view: GraphView, reduction: NodeProto) -> tuple[set[int], int]:
    """The axes of a reduction, counted from the end where the rank is known, and the rank, which is 0 if it is not."""
    axes, dims = axes_of(view, reduction), view.dims(reduction.input[0])
    rank = len(dims) if dims is not None else 0
    return {axis - rank if rank and axis >= 0 else axis for axis in axes}, rank


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
