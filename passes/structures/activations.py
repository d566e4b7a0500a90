"""Find GELU, GEGLU and SwiGLU: as one op each, or as several. A curve is known by its elements, whatever makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final

import numpy as np
from onnx import NodeProto

from passes.graph.op_facts import ARRANGING, op_of
from passes.structures.candidates import PROJECTION_OPS, Candidate, find_fused
from passes.structures.samples import FUNCTIONS, Sample, candidates_before, gelu, quick_gelu
from passes.structures.view import GraphView
from passes.weights.stand_ins import Array

GELU_OPS: Final = ("Gelu", *(f"com.microsoft.{name}" for name in ("Gelu", "FastGelu", "QuickGelu", "BiasGelu")))


def find_gelus(view: GraphView) -> Iterator[Candidate]:
    """Each GELU, as one operator or written with Erf, Tanh, Sigmoid or Exp."""
    yield from find_fused(view, GELU_OPS)
    for op in ROOTS:
        for node in view.by_op.get(op, ()):
            yield from _spelled_out(view, node)


def _spelled_out(view: GraphView, curve: NodeProto) -> Iterator[Candidate]:
    """The first value after `curve` that is a GELU of a value before it, in any order of its operators."""
    samples = _samples_before(view, curve)
    for last in _ends(view, curve):
        for x, sample in samples.items():
            elements = sample.of(last.output[0])
            if elements is not None and any(_is_near(elements, form(GRID)) for form in (gelu, quick_gelu)):
                nodes = _nodes_after(view, curve, last, sample)
                yield Candidate(last, nodes, (x, curve.output[0], last.output[0]))
                return


def _samples_before(view: GraphView, curve: NodeProto) -> dict[str, Sample]:
    """For each value that `curve` may be a function of, a sample that has `GRID` for it."""
    sources = islice(candidates_before(view, curve.input[0], POINTWISE), MOST_VALUES)
    return {x: Sample(view, {x: GRID}) for x in sources}


def _ends(view: GraphView, curve: NodeProto) -> list[NodeProto]:
    """The nodes after `curve` that may end what it belongs to, nearest first."""
    reached = islice(view.downstream(curve.output[0], POINTWISE), MOST_VALUES)
    return [node for node, _ in reached if node.op_type in FACTORS]


def _nodes_after(view: GraphView, curve: NodeProto, last: NodeProto, sample: Sample) -> tuple[NodeProto, ...]:
    """`curve` and the nodes after it from which `sample` computes the output of `last`, with `last` at the end."""
    after = {node.output[0] for node, _ in view.downstream(curve.output[0], POINTWISE)}
    return (curve, *(node for node in sample.nodes_of(last.output[0]) if node.output[0] in after))


def _is_near(elements: Array, wanted: Array) -> bool:
    return elements.shape == wanted.shape and np.allclose(elements, wanted, rtol=NEARLY, atol=NEARLY)


ROOTS: Final = ("Erf", "Tanh", "Sigmoid", "Exp")

POINTWISE: Final = frozenset(FUNCTIONS) | {"Identity", "Cast", "Dropout", "QuantizeLinear", "DequantizeLinear"}

FACTORS: Final = frozenset({"Mul", "Div", "Add", "Sub"})
"""The ops that a GELU, or the product with a gate, may end with."""

GRID: Final = np.linspace(-4.0, 4.0, 33)

NEARLY: Final = 2e-3
"""Constants may have been rounded to bfloat16, and the GELU with Tanh differs by less than 5e-4. A SiLU differs by more
than 0.1."""

MOST_VALUES: Final = 12
"""The most values before a curve, and after it, between which a GELU or a gate is looked for."""


def find_swiglus(view: GraphView) -> Iterator[Candidate]:
    """silu(gate)·up, with bounds on both, a sum in `up` and a factor in the sigmoid too, as in gpt-oss."""
    yield from _find_gates(view, ("Sigmoid", "Exp", "Swish", "com.microsoft.QuickGelu"), _is_silu)


def find_geglus(view: GraphView) -> Iterator[Candidate]:
    """Each product of a GELU with another projection of the same value."""
    yield from _find_gates(view, (*ROOTS, *GELU_OPS), lambda elements: _is_near(elements, gelu(GRID)))


def _is_silu(elements: Array) -> bool:
    """Whether the elements are x·σ(β·x) for the elements x of `GRID` and some number β."""
    x, share = GRID[GRID != 0], elements[GRID != 0] / GRID[GRID != 0]
    with np.errstate(all="ignore"):
        slopes = np.log(share / (1 - share)) / x
    return bool(slopes.min() > 0.5) and np.allclose(slopes, slopes.mean(), rtol=NEARLY)


def _find_gates(view: GraphView, roots: Iterable[str], is_curve: Callable[[Array], bool]) -> Iterator[Candidate]:
    """Each product of a curve of one product with another product, or part of a product, of the same data."""
    for curve in (node for root in roots for node in view.by_op.get(root, ())):
        found = next(_gates_at(view, curve, is_curve), None)
        if found is not None:
            yield found


def _gates_at(view: GraphView, curve: NodeProto, is_curve: Callable[[Array], bool]) -> Iterator[Candidate]:
    samples = _samples_before(view, curve)
    for last in _ends(view, curve):
        for x, known in samples.items():
            if known.of(last.output[0]) is not None:
                continue
            other = _other_factor(view, x, last)
            sample = Sample(view, {x: GRID[:, None], other: np.array(FACTORS_OF_GATE)})
            elements = sample.of(last.output[0])
            gate, up = _product_before(view, x), _product_before(view, other)
            if elements is None or gate is None or up is None or not is_curve(_curve_of(elements)):
                continue
            if view.source(gate.input[0]) == view.source(up.input[0]):
                products = (gate,) if gate.output[0] == up.output[0] else (gate, up)
                pins = (*(node.output[0] for node in products), curve.output[0], last.output[0])
                yield Candidate(last, (*products, *_nodes_after(view, curve, last, sample)), pins, allow_gaps=True)


def _other_factor(view: GraphView, x: str, last: NodeProto) -> str:
    """The value that the output of `last` is computed from, apart from `x`; a sum of several, such as the product with
    a matrix and that of its adapter, counts as one."""
    sample = Sample(view, {x: GRID})
    sample.of(last.output[0])
    if len(sample.missing) == 1:
        return next(iter(sample.missing))
    name, unknown = "", {last.output[0]}
    while len(unknown) == 1:
        (name,) = unknown
        node = view.producers.get(name)
        reads = node.input if node is not None and op_of(node) in FUNCTIONS else ()
        unknown = {view.source(read) for read in reads if read and sample.of(read) is None}
    return name


def _curve_of(elements: Array) -> Array:
    """The curve f in f(gate)·(a·up + b), where `elements` has a row for each gate of `GRID` and a column for each up.

    Of SiLU and GELU, f(x)/x and f(-x)/-x add up to 1, which determines a. NaN where the elements have another form.
    """
    low, middle, high = FACTORS_OF_GATE
    nothing = np.full_like(GRID, np.nan)
    if elements.shape != (len(GRID), 3) or not np.isfinite(elements).all():
        return nothing
    slopes = (elements[:, 2] - elements[:, 0]) / (high - low)
    ends = elements[:, 0] - slopes * low
    factor = slopes[-1] / GRID[-1] + slopes[0] / GRID[0]
    if not factor:
        return nothing
    is_line = np.allclose(elements[:, 1], ends + slopes * middle, rtol=NEARLY, atol=NEARLY)
    is_sum = np.allclose(ends * slopes[-1], slopes * ends[-1], rtol=NEARLY, atol=NEARLY)
    return slopes / factor if is_line and is_sum else nothing


FACTORS_OF_GATE: Final = (-1.5, 0.5, 2.0)
"""Samples of the value that a gate multiplies."""


def _product_before(view: GraphView, name: str) -> NodeProto | None:
    """The product with a constant matrix that computes `name`, up to a bias, a factor and the selection of a part."""
    for node in view.upstream(name, BETWEEN | {"Mul", "Div"}, until=lambda node: _multiplies_data(view, node)):
        if op_of(node) in PROJECTION_OPS or node.op_type == "Einsum":
            return node if node.input[1] in view.folded and node.input[0] not in view.folded else None
    return None


def _multiplies_data(view: GraphView, node: NodeProto) -> bool:
    return node.op_type in ("Mul", "Div") and view.folded.isdisjoint(node.input)


BETWEEN: Final = (ARRANGING - {"Flatten"}) | {
    *("Add", "CastLike", "Clip", "Min", "Max", "QuantizeLinear", "DequantizeLinear"),
    *("Split", "SplitToSequence", "SequenceAt", "Slice", "Gather"),
}
