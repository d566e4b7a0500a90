"""Rotary embedding: x·cos + rotated(x)·sin, with the halves or the pairs of x rotated, or one op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from onnx import NodeProto

from passes.structures.sketch import Sketch
from passes.structures.view import GraphView

__all__ = ["rotary_embeddings"]


def rotary_embeddings(view: GraphView) -> Iterator[Sketch]:
    for op in ("RotaryEmbedding", "com.microsoft.RotaryEmbedding"):
        for node in view.by_op.get(op, ()):
            yield Sketch(node, (node,), (node.input[0], node.output[0]))
    for turn in view.by_op.get("Neg", ()):
        yield from _whole(view, turn)
    for difference in view.by_op.get("Sub", ()):
        yield from _by_parts(view, difference)


def _whole(view: GraphView, turn: NodeProto) -> Iterator[Sketch]:
    """x·cos + concat(-b, a)·sin, where a and b are parts of x."""
    for joined, _ in view.downstream(turn.output[0], REARRANGE):
        if joined.op_type != "Concat":
            continue
        wholes = [
            set(_wholes(view, turn.input[0] if (one := _before(view, name)) == turn.output[0] else one))
            for name in joined.input
        ]
        common = set.intersection(*wholes)
        for rotated, _ in view.downstream(joined.output[0], REARRANGE):
            for total in view.readers(rotated.output[0], "Add") if rotated.op_type == "Mul" else ():
                straight = view.maker(_other(view, total, rotated.output[0]), "Mul")
                x = common.intersection(view.source(one) for one in straight.input) if straight is not None else ()
                if straight is not None and len(x) == 1:
                    nodes = (turn, joined, rotated, straight, total)
                    yield Sketch(total, nodes, (*x, joined.output[0], total.output[0]))


def _by_parts(view: GraphView, difference: NodeProto) -> Iterator[Sketch]:
    """concat(a·cos - b·sin, b·cos + a·sin), where a and b are parts of x."""
    left, right = (view.maker(name, "Mul") for name in difference.input)
    if left is None or right is None:
        return
    for a in left.input:
        for total, crossed in _crossed_sums(view, a, left, right):
            for joined, _ in view.downstream(difference.output[0], REARRANGE):
                parts = {view.source(_before(view, name)) for name in joined.input}
                if joined.op_type == "Concat" and parts == {difference.output[0], total.output[0]}:
                    nodes = (left, right, difference, *crossed, total, joined)
                    yield Sketch(joined, nodes, (difference.output[0], total.output[0], joined.output[0]))


def _crossed_sums(
    view: GraphView, a: str, left: NodeProto, right: NodeProto
) -> Iterator[tuple[NodeProto, tuple[NodeProto, NodeProto]]]:
    """Sums b·cos + a·sin, given that left = a·cos and right = b·sin."""
    cos = view.source(_other(view, left, view.source(a)))
    for product in view.readers(view.source(a), "Mul"):
        sin = view.source(_other(view, product, view.source(a)))
        if product.output[0] == left.output[0] or sin not in {view.source(name) for name in right.input}:
            continue
        b = view.source(_other(view, right, sin))
        for total in view.readers(product.output[0], "Add"):
            second = view.maker(_other(view, total, product.output[0]), "Mul")
            if second is not None and {view.source(name) for name in second.input} == {b, cos}:
                yield total, (product, second)


def _wholes(view: GraphView, part: str) -> Iterator[str]:
    """The values that `part` was cut out of, nearest first."""
    for node in view.upstream(part, CUTS):
        if node.op_type in CUTS:
            yield view.source(node.input[0])


def _before(view: GraphView, name: str) -> str:
    """`name` before it was rearranged."""
    node = view.producers.get(name)
    while node is not None and node.op_type in REARRANGE and node.op_type != "Concat":
        name = node.input[0]
        node = view.producers.get(name)
    return name


def _other(view: GraphView, node: NodeProto, name: str) -> str:
    """The operand of a binary `node` that is not `name`."""
    return node.input[0] if view.source(node.input[1]) == name else node.input[1]


CUTS: Final = frozenset({"Slice", "Split", "SplitToSequence", "SequenceAt", "Gather", "Identity", "Squeeze"})
"""What takes a half, or every second element."""

REARRANGE: Final = frozenset({"Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Identity", "Cast"})
