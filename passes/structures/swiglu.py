"""SwiGLU: silu(x·W) · (x·V), the gate of a feed-forward layer, with two matrices or one that is split."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from onnx import NodeProto

from passes.structures.sketch import PRODUCTS, Sketch
from passes.structures.view import GraphView, op_of

__all__ = ["swiglus"]


def swiglus(view: GraphView) -> Iterator[Sketch]:
    for curve in view.by_op.get("Sigmoid", ()):
        x = view.source(curve.input[0])
        for silu in view.readers(curve.output[0], "Mul"):
            if x in {view.source(name) for name in silu.input}:
                yield from _gated(view, x, (curve, silu))
    for silu in view.by_op.get("Swish", ()):
        yield from _gated(view, view.source(silu.input[0]), (silu,))


def _gated(view: GraphView, x: str, silu: tuple[NodeProto, ...]) -> Iterator[Sketch]:
    gate = _product_behind(view, x)
    for product in view.readers(silu[-1].output[0], "Mul"):
        first, second = (view.source(name) for name in product.input)
        up = _product_behind(view, first if second == silu[-1].output[0] else second)
        if gate is None or up is None or view.source(gate.input[0]) != view.source(up.input[0]):
            continue
        products = (gate,) if gate.output[0] == up.output[0] else (gate, up)
        pins = (*(one.output[0] for one in products), silu[0].output[0], product.output[0])
        yield Sketch(product, (*products, *silu, product), pins, far=True)


def _product_behind(view: GraphView, name: str) -> NodeProto | None:
    """The product with a constant matrix that `name` is, but for a bias and the choice of a part."""
    for node in view.upstream(name, BETWEEN):
        if op_of(node) in PRODUCTS:
            return node if node.input[1] in view.folded and node.input[0] not in view.folded else None
    return None


BETWEEN: Final = frozenset(
    {*("Add", "Reshape", "Transpose", "Identity", "Cast", "CastLike", "Squeeze", "Unsqueeze", "Clip")}
    | {*("Split", "SplitToSequence", "SequenceAt", "Slice", "Gather")}
)
