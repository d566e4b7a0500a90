"""Where attention is: softmax(Q·Kᵀ)·V by its shape, or one operator. A softmax may be spelled with Exp (Reformer)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from onnx import NodeProto

from passes.structures.view import GraphView, op_of

__all__ = ["Operands", "attention_operands"]


@dataclass(frozen=True, slots=True)
class Operands:
    """The values that enter attention as Q, K and V."""

    query: str
    key: str
    value: str


def attention_operands(view: GraphView) -> Iterator[tuple[Operands, ...]]:
    """For each attention, in order, the ways to read it.

    There are several where scores are a sum: content with content, and content with relative positions.
    """
    for node in view.nodes:
        if op_of(node) in ATTENTION_OPS and len(node.input) >= 3 and all(node.input[:3]):
            yield (Operands(*node.input[:3]),)
        elif node.op_type in ("Softmax", "Exp"):
            scores = _products_before(view, node)
            values = list(dict.fromkeys(_values_after(view, node)))
            found = tuple(Operands(one.input[0], one.input[1], value) for one in scores for value in values)
            if found:
                yield found


def _products_before(view: GraphView, softmax: NodeProto) -> list[NodeProto]:
    walk = view.upstream(softmax.input[0], BEFORE, until=lambda node: _joins(view, node))
    return [node for node in walk if _joins(view, node)]


def _values_after(view: GraphView, softmax: NodeProto) -> Iterator[str]:
    walk = view.downstream(softmax.output[0], AFTER, until=lambda node: _joins(view, node))
    for node, weights in walk:
        if _joins(view, node):
            yield node.input[1] if node.input[0] == weights else node.input[0]


def _joins(view: GraphView, node: NodeProto) -> bool:
    """A product of two computed values. One with a constant is a projection, or mixes heads."""
    operands = [name for name in node.input if name]
    return node.op_type in ("MatMul", "Einsum") and len(operands) == 2 and view.folded.isdisjoint(operands)


ATTENTION_OPS: Final = frozenset({"Attention", "com.microsoft.MultiHeadAttention", "com.microsoft.GroupQueryAttention"})
"""Operators whose first three inputs are Q, K and V."""

LAYOUT: Final = ("Cast", "CastLike", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Expand")

BEFORE: Final = frozenset(
    {
        *LAYOUT,
        *("Add", "Sub", "Mul", "Div", "Where", "Min", "Max", "Clip", "Tanh", "MatMul", "Einsum"),
        *("Concat", "Slice", "Pad", "Gather", "GatherElements", "ScatterND", "ScatterElements"),
    }
)
"""What may stand between Q·Kᵀ and the softmax: scale, mask, bias, soft cap, sinks, talking heads, windows."""

AFTER: Final = frozenset(
    {*LAYOUT, *("Where", "Mul", "Sub", "Add", "Div", "Dropout", "MatMul", "Einsum", "Slice", "Split", "Pad", "Concat")}
)
"""What may stand between the softmax and its product with V."""
