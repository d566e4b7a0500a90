"""Find GELU, GEGLU and SwiGLU: as one op each, or as several. A GELU is known by its numbers, whatever makes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np
from onnx import NodeProto

from passes.graph.op_facts import ARRANGING, op_of
from passes.structures.candidates import PROJECTION_OPS, Candidate, find_fused
from passes.structures.view import GraphView
from passes.weights.stand_ins import Array

GELU_OPS: Final = (
    "Gelu",
    *(f"com.microsoft.{name}" for name in ("Gelu", "FastGelu", "QuickGelu", "BiasGelu")),
)


def find_gelus(view: GraphView) -> Iterator[Candidate]:
    """Each GELU, as one operator or written with Erf, Tanh or Sigmoid."""
    yield from find_fused(view, GELU_OPS)
    for op in ("Erf", "Tanh", "Sigmoid"):
        for node in view.by_op.get(op, ()):
            yield from _spelled_out(view, node)


def _spelled_out(view: GraphView, curve: NodeProto) -> Iterator[Candidate]:
    """The first value after `curve` that is a GELU of a value before it, in any order of its operators."""
    before = [curve.input[0], *(name for node in view.upstream(curve.input[0], POINTWISE) for name in node.input)]
    sources = [name for name in dict.fromkeys(map(view.source, before)) if name not in view.folded][:MOST_VALUES]
    for last, _ in list(view.downstream(curve.output[0], POINTWISE))[:MOST_VALUES]:
        for x in sources if last.op_type in FACTORS else ():
            values: dict[str, Array | None] = {}
            computed = _values_at(view, last.output[0], {x: GRID}, values)
            if computed is None or not any(np.allclose(computed, gelu, rtol=NEARLY, atol=NEARLY) for gelu in GELUS):
                continue
            after = [node for node, _ in view.downstream(curve.output[0], POINTWISE) if node.output[0] in values]
            nodes = (curve, *(node for node in after if node is not last), last)
            yield Candidate(last, nodes, (x, curve.output[0], last.output[0]))
            return


def _values_at(view: GraphView, name: str, known: Mapping[str, Array], values: dict[str, Array | None]) -> Array | None:
    """The elements of `name`, computed from the values in `known`; None if `name` depends on any other value.

    Args:
        view: the index of the graph.
        name: the value to compute.
        known: value → its elements.
        values: filled in with the elements of all values on the way.
    """
    name = view.source(name)
    if name in known:
        return known[name]
    if name not in values:
        values[name] = None  # until it is computed
        number = view.scalar(name)
        node = view.producers.get(name)
        if number is not None:
            values[name] = np.full_like(GRID, number)
        elif (
            node is not None and op_of(node) in FUNCTIONS and name not in view.folded and len(values) < 3 * MOST_VALUES
        ):
            inputs = [_values_at(view, read, known, values) for read in node.input]
            if all(read is not None for read in inputs):
                with np.errstate(all="ignore"):
                    values[name] = FUNCTIONS[node.op_type](*inputs)
    return values[name]


def _erf(x: Array) -> Array:
    return np.asarray([math.erf(number) for number in x])


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


FUNCTIONS: Final[Mapping[str, Callable[..., Array]]] = {
    **{"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Pow": np.power, "Neg": np.negative},
    **{"Tanh": np.tanh, "Erf": _erf, "Sigmoid": _sigmoid},
}

POINTWISE: Final = frozenset(FUNCTIONS) | {"Identity", "Cast", "Dropout", "QuantizeLinear", "DequantizeLinear"}

FACTORS: Final = frozenset({"Mul", "Div", "Add", "Sub"})
"""The ops that a GELU may end with."""

GRID: Final = np.linspace(-4.0, 4.0, 33)

GELUS: Final = tuple(GRID * weight for weight in ((1 + _erf(GRID / math.sqrt(2))) / 2, _sigmoid(1.702 * GRID)))
"""By Erf and by Sigmoid; the form with Tanh differs from the first by less than 5e-4."""

NEARLY: Final = 2e-3
"""Constants may have been rounded to bfloat16. A SiLU is more than 0.1 off."""

MOST_VALUES: Final = 12
"""The most values before a curve, and after it, between which a GELU is looked for."""


def find_swiglus(view: GraphView) -> Iterator[Candidate]:
    """silu(gate)·up, with bounds on both and a factor in the sigmoid too, as in gpt-oss."""
    for curve in view.by_op.get("Sigmoid", ()):
        scaled = view.find_producer(curve.input[0], "Mul")
        reads = [] if scaled is None else [name for name in scaled.input if view.scalar(name) is None]
        inside = {view.source(name) for name in (curve.input[0], *(reads if len(reads) == 1 else ()))}
        for silu in view.find_consumers(curve.output[0], "Mul"):
            gate = view.source(view.other_operand(silu, curve.output[0]))
            if gate in inside:
                yield from _find_gated(view, gate, (curve, silu))
    for op in ("Swish", "com.microsoft.QuickGelu"):
        for silu in view.by_op.get(op, ()):
            yield from _find_gated(view, view.source(silu.input[0]), (silu,))


def find_geglus(view: GraphView) -> Iterator[Candidate]:
    """Each product of a GELU with another projection of the same value."""
    for gelu in find_gelus(view):
        yield from _find_gated(view, view.source(gelu.pins[0]), gelu.nodes)


def _find_gated(view: GraphView, x: str, curve: tuple[NodeProto, ...]) -> Iterator[Candidate]:
    """The products of the value of `curve`, which is made from `x`, with another part or product of the same input."""
    gate, value = _product_before(view, x), curve[-1].output[0]
    for product in view.find_consumers(value, "Mul"):
        other = view.source(view.other_operand(product, value))
        up = _product_before(view, other)
        if gate is None or up is None or other == x or view.source(gate.input[0]) != view.source(up.input[0]):
            continue
        products = (gate,) if gate.output[0] == up.output[0] else (gate, up)
        pins = (*(node.output[0] for node in products), curve[0].output[0], product.output[0])
        yield Candidate(product, (*products, *curve, product), pins, allow_gaps=True)


def _product_before(view: GraphView, name: str) -> NodeProto | None:
    """The product with a constant matrix that computes `name`, up to a bias and the selection of a part."""
    for node in view.upstream(name, BETWEEN):
        if op_of(node) in PROJECTION_OPS:
            return node if node.input[1] in view.folded and node.input[0] not in view.folded else None
    return None


BETWEEN: Final = (ARRANGING - {"Flatten"}) | {
    *("Add", "CastLike", "Clip", "Min", "Max", "QuantizeLinear", "DequantizeLinear"),
    *("Split", "SplitToSequence", "SequenceAt", "Slice", "Gather"),
}
