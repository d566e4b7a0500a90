"""Attention: softmax(Q·Kᵀ)·V spelled out, or one op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from onnx import NodeProto

from passes.structures.sketch import Sketch
from passes.structures.view import GraphView

__all__ = ["attentions"]


def attentions(view: GraphView) -> Iterator[Sketch]:
    for op in ATTENTION_OPS:
        for node in view.by_op.get(op, ()):
            yield Sketch(node, (node,), (*(name for name in node.input[:3] if name), node.output[0]))
    for softmax in view.by_op.get("Softmax", ()):
        scores = next((up for up in view.upstream(softmax.input[0], BEFORE) if _joins(view, up)), None)
        context = next((down for down, _ in view.downstream(softmax.output[0], AFTER) if _joins(view, down)), None)
        if scores is not None and context is not None:
            pins = (scores.output[0], softmax.output[0], context.output[0])
            yield Sketch(context, (scores, softmax, context), pins, far=True)


def _joins(view: GraphView, node: NodeProto) -> bool:
    """A product of two computed values. One with a constant is a projection, or mixes heads."""
    operands = [name for name in node.input if name]
    return node.op_type in ("MatMul", "Einsum") and len(operands) == 2 and not view.folded.intersection(operands)


ATTENTION_OPS: Final = (
    "Attention",
    *(f"com.microsoft.{name}" for name in ("Attention", "MultiHeadAttention", "GroupQueryAttention")),
)

_LAYOUT = ("Cast", "CastLike", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Expand", "Slice", "Concat")

BEFORE: Final = frozenset(
    {*_LAYOUT, *("Add", "Sub", "Mul", "Div", "Where", "Min", "Max", "Clip", "Tanh", "MatMul", "Pad")}
)
"""What may stand between Q·Kᵀ and the softmax: scale, mask, bias, soft cap, sinks, heads that are mixed."""

AFTER: Final = frozenset({*_LAYOUT, *("Mul", "Div", "Where", "Dropout", "MatMul", "Add")})
"""What may stand between the softmax and its product with V."""
