"""Find GELU and SwiGLU: as one op each, or as several."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from onnx import NodeProto

from passes.structures.candidates import PRODUCTS, Candidate, find_fused
from passes.structures.view import GraphView, op_of

__all__ = ["BETWEEN", "GELU_OPS", "find_gelus", "find_swiglus"]


GELU_OPS: Final = (
    "Gelu",
    *(f"com.microsoft.{name}" for name in ("Gelu", "FastGelu", "QuickGelu", "BiasGelu")),
)


def find_gelus(view: GraphView) -> Iterator[Candidate]:
    yield from find_fused(view, GELU_OPS)
    for op in ("Erf", "Tanh"):
        for node in view.by_op.get(op, ()):
            yield from _exact(view, node)
    for node in view.by_op.get("Sigmoid", ()):
        yield from _quick(view, node)


def _exact(view: GraphView, curve: NodeProto) -> Iterator[Candidate]:
    """0.5 · x · (1 + curve), in whichever order the three factors are multiplied."""
    for plus in view.readers(curve.output[0], "Add"):
        if not any(_is(view, name, 1.0) for name in plus.input):
            continue
        for factors, products in _products(view, plus):
            data = [view.source(name) for name in factors if view.scalar(name) is None]
            halves = [name for name in factors if _is(view, name, 0.5)]
            if len(data) == len(halves) == 1 and _is_curve_of(view, curve, data[0]):
                last = products[-1]
                yield Candidate(last, (curve, plus, *products), (data[0], curve.output[0], last.output[0]))


def _products(view: GraphView, plus: NodeProto) -> Iterator[tuple[tuple[str, str], tuple[NodeProto, ...]]]:
    """The two other factors of a product with `plus`, and the nodes that multiply the three."""
    for product in view.readers(plus.output[0], "Mul"):
        other = view.other_operand(product, plus.output[0])
        inner = view.maker(other, "Mul")
        if inner is not None:
            yield (inner.input[0], inner.input[1]), (product,)
        for last in view.readers(product.output[0], "Mul"):
            yield (other, view.other_operand(last, product.output[0])), (product, last)


def _is_curve_of(view: GraphView, curve: NodeProto, x: str) -> bool:
    """Whether `curve` is Erf(x/√2), or Tanh(√(2/π)·(x + 0.044715·x³)) in any form, of `x`."""
    numbers = _numbers_over(view, curve.input[0], x)
    if curve.op_type == "Erf":
        return any(_is_near(number, root) for number in numbers for root in (math.sqrt(0.5), math.sqrt(2.0)))
    slope = math.sqrt(2.0 / math.pi)
    return any(_is_near(number, cubic) for number in numbers for cubic in (0.044715, 0.044715 * slope))


def _numbers_over(view: GraphView, name: str, x: str) -> list[float]:
    """The constants of a polynomial of `x` alone; empty if it depends on something else."""
    numbers: list[float] = []
    front = [name]
    while front:
        name = view.source(front.pop())
        number = view.scalar(name)
        node = view.maker(name, "Mul", "Div", "Add", "Pow")
        if number is not None:
            numbers.append(number)
        elif name != x and (node is None or len(numbers) > MOST_NUMBERS):
            return []
        elif name != x and node is not None:
            front.extend(node.input)
    return numbers


def _quick(view: GraphView, curve: NodeProto) -> Iterator[Candidate]:
    """x · sigmoid(1.702·x)."""
    scaled = view.maker(curve.input[0], "Mul")
    if scaled is None or not any(_is(view, name, 1.702) for name in scaled.input):
        return
    data = {view.source(name) for name in scaled.input if view.scalar(name) is None}
    for product in view.readers(curve.output[0], "Mul"):
        x = view.source(view.other_operand(product, curve.output[0]))
        if x in data:
            yield Candidate(product, (curve, product), (x, curve.output[0], product.output[0]))


def _is(view: GraphView, name: str, number: float) -> bool:
    scalar = view.scalar(name)
    return scalar is not None and _is_near(scalar, number)


def _is_near(number: float, other: float) -> bool:
    return math.isclose(number, other, rel_tol=1e-3)


MOST_NUMBERS: Final = 8
"""The most constants of such a polynomial."""


def find_swiglus(view: GraphView) -> Iterator[Candidate]:
    for curve in view.by_op.get("Sigmoid", ()):
        x = view.source(curve.input[0])
        for silu in view.readers(curve.output[0], "Mul"):
            if x in {view.source(name) for name in silu.input}:
                yield from _find_gated(view, x, (curve, silu))
    for silu in view.by_op.get("Swish", ()):
        yield from _find_gated(view, view.source(silu.input[0]), (silu,))


def _find_gated(view: GraphView, x: str, silu: tuple[NodeProto, ...]) -> Iterator[Candidate]:
    gate = _product_behind(view, x)
    for product in view.readers(silu[-1].output[0], "Mul"):
        first, second = (view.source(name) for name in product.input)
        up = _product_behind(view, first if second == silu[-1].output[0] else second)
        if gate is None or up is None or view.source(gate.input[0]) != view.source(up.input[0]):
            continue
        products = (gate,) if gate.output[0] == up.output[0] else (gate, up)
        pins = (*(one.output[0] for one in products), silu[0].output[0], product.output[0])
        yield Candidate(product, (*products, *silu, product), pins, allow_gaps=True)


def _product_behind(view: GraphView, name: str) -> NodeProto | None:
    """The product with a constant matrix behind `name`, seen through a bias and the selection of a part."""
    for node in view.upstream(name, BETWEEN):
        if op_of(node) in PRODUCTS:
            return node if node.input[1] in view.folded and node.input[0] not in view.folded else None
    return None


BETWEEN: Final = frozenset(
    {*("Add", "Reshape", "Transpose", "Identity", "Cast", "CastLike", "Squeeze", "Unsqueeze", "Clip")}
    | {"QuantizeLinear", "DequantizeLinear"}
    | {*("Split", "SplitToSequence", "SequenceAt", "Slice", "Gather")}
)
