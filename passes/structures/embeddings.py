"""Find embeddings: a lookup of rows in a table of weights, and the rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from onnx import NodeProto, TensorProto

from passes.graph.op_facts import ARRANGING, attribute_of
from passes.structures.candidates import Candidate, find_fused
from passes.structures.view import DEQUANTIZE, QUANTIZE, GraphView, quantized_weight

TABLE_TYPES = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})


def find_embeddings(view: GraphView) -> Iterator[Candidate]:
    """Each Gather on axis 0 of a matrix. A lookup by constant indices is itself constant; `instances_of` drops it."""
    for node in view.by_op.get("Gather", ()):
        if attribute_of(node, "axis", 0) == 0 and _is_table(view, node.input[0]):
            yield Candidate(node, (node,), (node.output[0],))


def _is_table(view: GraphView, name: str) -> bool:
    quantized = quantized_weight(view, name)
    if quantized is not None:
        return len(quantized.stored.dims) == 2
    table = view.weight_behind(name)
    return table is not None and len(table.dims) == 2 and table.data_type in TABLE_TYPES


def find_rotary_embeddings(view: GraphView) -> Iterator[Candidate]:
    yield from find_fused(view, ("RotaryEmbedding", "com.microsoft.RotaryEmbedding"))
    for turn in view.by_op.get("Neg", ()):
        yield from _find_whole(view, turn)
    for difference in view.by_op.get("Sub", ()):
        yield from _by_parts(view, difference)


def _find_whole(view: GraphView, turn: NodeProto) -> Iterator[Candidate]:
    """x·cos + concat(-b, a)·sin, where a and b are parts of x."""
    for joined, _ in view.downstream(turn.output[0], BETWEEN):
        if joined.op_type != "Concat":
            continue
        wholes = [
            set(_wholes(view, turn.input[0] if value == turn.output[0] else value))
            for value in (view.origin_of(name, ARRANGING, pairs=True) for name in joined.input)
        ]
        common = set.intersection(*wholes)
        for rotated, _ in view.downstream(joined.output[0], BETWEEN):
            for total in view.readers(rotated.output[0], "Add") if rotated.op_type == "Mul" else ():
                straight = view.maker(view.other_operand(total, rotated.output[0]), "Mul")
                x = common.intersection(map(view.source, straight.input)) if straight is not None else ()
                if straight is not None and len(x) == 1:
                    nodes = (turn, joined, rotated, straight, total)
                    yield Candidate(total, nodes, (*x, joined.output[0], total.output[0]))


def _by_parts(view: GraphView, difference: NodeProto) -> Iterator[Candidate]:
    """concat(a·cos - b·sin, b·cos + a·sin), where a and b are parts of x."""
    left, right = (view.maker(name, "Mul") for name in difference.input)
    if left is None or right is None:
        return
    for a in left.input:
        for total, crossed in _crossed_sums(view, a, left, right):
            for joined, _ in view.downstream(difference.output[0], BETWEEN):
                parts = {view.source(view.origin_of(name, ARRANGING, pairs=True)) for name in joined.input}
                if joined.op_type == "Concat" and parts == {difference.output[0], total.output[0]}:
                    nodes = (left, right, difference, *crossed, total, joined)
                    yield Candidate(joined, nodes, (difference.output[0], total.output[0], joined.output[0]))


def _crossed_sums(
    view: GraphView, a: str, left: NodeProto, right: NodeProto
) -> Iterator[tuple[NodeProto, tuple[NodeProto, NodeProto]]]:
    """Sums b·cos + a·sin, given that left = a·cos and right = b·sin."""
    cos = view.source(view.other_operand(left, view.source(a)))
    for product in view.readers(view.source(a), "Mul"):
        sin = view.source(view.other_operand(product, view.source(a)))
        if product.output[0] == left.output[0] or sin not in {view.source(name) for name in right.input}:
            continue
        b = view.source(view.other_operand(right, sin))
        for total in view.readers(product.output[0], "Add"):
            second = view.maker(view.other_operand(total, product.output[0]), "Mul")
            if second is not None and {view.source(name) for name in second.input} == {b, cos}:
                yield total, (product, second)


def _wholes(view: GraphView, part: str) -> Iterator[str]:
    """The values that `part` was cut out of, nearest first."""
    for node in view.upstream(part, CUTS):
        if node.op_type in CUTS:
            yield view.source(node.input[0])


CUTS: Final = frozenset(
    {"Slice", "Split", "SplitToSequence", "SequenceAt", "Gather", "Identity", "Squeeze", QUANTIZE, DEQUANTIZE}
)
"""Ops that take a half, or every second element, and what may be between two of them."""

BETWEEN: Final = ARRANGING | {QUANTIZE, DEQUANTIZE, "Clip"}
"""Ops that may be between two steps of a rotary embedding."""
