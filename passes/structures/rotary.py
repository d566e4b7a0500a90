"""Find rotary embeddings: as one operator, or as sums of products with cosines and sines.

The features of x are turned in pairs. A pair is two neighbours, or two features from the two halves of x. There are
three forms: x·cos + turned(x)·sin; both halves by themselves, joined afterwards; and the product with 2×2 rotations.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from itertools import chain, combinations, islice, permutations
from typing import Final

import numpy as np
from onnx import NodeProto

from passes.graph.op_facts import ARRANGING
from passes.structures.candidates import Candidate, find_fused
from passes.structures.matrices import matrix_of, matrix_values
from passes.structures.view import DEQUANTIZE, QUANTIZE, GraphView, carried_inputs


def find_rotary_embeddings(view: GraphView) -> Iterator[Candidate]:
    """Each rotary embedding, as one operator or written with halves or pairs that change places."""
    yield from find_fused(view, ("RotaryEmbedding", "com.microsoft.RotaryEmbedding"))
    of_halves = [found for node in view.by_op.get("Sub", ()) for found in _find_sums_of_halves(view, node)]
    yield from of_halves
    inner = {node.output[0] for found in of_halves for node in found.nodes}
    for total in view.by_op.get("Add", ()):
        if total.output[0] not in inner:
            yield from islice(chain(_find_turned_values(view, total), _find_products_with_rotations(view, total)), 1)


def _find_turned_values(view: GraphView, total: NodeProto) -> Iterator[Candidate]:
    """x·cos + turned(x)·sin, where `turned` joins parts of x in another order: with a Neg of one part, or with tables
    that are made by Cos and Sin."""
    products = [node for name in total.input if (node := view.find_producer(name, "Mul")) is not None]
    for straight, rotated in permutations(products, 2):
        for x, turned in itertools.product(map(view.source, straight.input), rotated.input):
            between = _linear_nodes(view, turned, x)
            joined = next((node for node in between if node.op_type in ("Concat", "MatMul")), None)
            if joined is None:
                continue
            negations = _negations(view, joined, x)
            tables = view.other_operand(straight, x), view.other_operand(rotated, turned)
            if negations is None:
                continue
            if negations or all(_reads(view, table, op) for table, op in zip(tables, ("Cos", "Sin"), strict=True)):
                nodes = (*negations[:1], joined, rotated, straight, total)
                yield Candidate(total, nodes, (x, joined.output[0], total.output[0]))


def _find_products_with_rotations(view: GraphView, total: NodeProto) -> Iterator[Candidate]:
    """a·[cos, sin] + b·[-sin, cos], where a and b are parts of one value."""
    products = [node for name in total.input if (node := view.find_producer(name, "Mul")) is not None]
    for first, second in combinations(products, 2):
        for a, b in itertools.product(map(view.source, first.input), map(view.source, second.input)):
            tables = view.other_operand(first, a), view.other_operand(second, b)
            if (
                a != b
                and set(_wholes(view, a)) & set(_wholes(view, b))
                and all(_reads(view, table, op) for table, op in itertools.product(tables, ("Cos", "Sin")))
            ):
                yield Candidate(total, (first, second, total), (a, b, total.output[0]))


def _negations(view: GraphView, joined: NodeProto, x: str) -> list[NodeProto] | None:
    """The Neg of some parts of x that `joined` puts in another order, or that its matrix does; None if it does
    something else."""
    if joined.op_type == "MatMul":
        return [] if _is_turn(view, joined.input[1]) else None
    parts = [_linear_nodes(view, name, x) for name in joined.input]
    negations = [next((node for node in part if node.op_type == "Neg"), None) for part in parts]
    if all(negations) or not all(any(node.op_type in PARTS for node in part) for part in parts):
        return None
    return [node for node in negations if node is not None]


def _is_turn(view: GraphView, name: str) -> bool:
    """Whether a constant matrix makes two features of each pair change places, perhaps with a sign."""
    matrix = matrix_of(view, name)
    values = None if matrix is None else matrix_values(view, matrix)
    if values is None or values.ndim != 2 or values.shape[0] != values.shape[1] or np.diag(values).any():
        return False
    return bool((np.abs(values) @ np.abs(values) == np.eye(len(values))).all())


def _linear_nodes(view: GraphView, name: str, x: str) -> list[NodeProto]:
    """The nodes that make `name` of the elements of x and of constants, nearest first; empty if it depends on another
    value."""
    nodes: list[NodeProto] = []
    front = [view.source(name)]
    for value in front:  # which grows meanwhile
        if value == x:
            continue
        node = view.producers.get(value)
        reads = [] if node is None else [read for read in carried_inputs(node) if read not in view.folded]
        if node is None or node.op_type not in TURNING or not reads or len(front) > MOST_PARTS:
            return []
        if node.op_type in ("Mul", "MatMul") and len(reads) > 1:
            return []
        nodes.append(node)
        front += [read for read in map(view.source, reads) if read not in front]
    return nodes


def _reads(view: GraphView, table: str, op: str) -> bool:
    """Whether `op` makes a table of cosines or sines."""
    return any(node.op_type == op for node in view.upstream(table, TURNING))


def _find_sums_of_halves(view: GraphView, difference: NodeProto) -> Iterator[Candidate]:
    """concat(a·cos - b·sin, b·cos + a·sin), where a and b are parts of x."""
    left, right = (view.find_producer(name, "Mul") for name in difference.input)
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
    for product in view.find_consumers(view.source(a), "Mul"):
        sin = view.source(view.other_operand(product, view.source(a)))
        if product.output[0] == left.output[0] or sin not in {view.source(name) for name in right.input}:
            continue
        b = view.source(view.other_operand(right, sin))
        for total in view.find_consumers(product.output[0], "Add"):
            second = view.find_producer(view.other_operand(total, product.output[0]), "Mul")
            if second is not None and {view.source(name) for name in second.input} == {b, cos}:
                yield total, (product, second)


def _wholes(view: GraphView, part: str) -> Iterator[str]:
    """The values that `part` was cut out of, nearest first."""
    for node in view.upstream(part, CUTS):
        if node.op_type in CUTS:
            yield view.source(node.input[0])


MOST_PARTS: Final = 24
"""The most values between x and the value that is turned."""

CUTS: Final = frozenset(
    {"Slice", "Split", "SplitToSequence", "SequenceAt", "Gather", "Identity", "Squeeze", QUANTIZE, DEQUANTIZE}
)
"""Ops that take a half, or every second element, and what may be between two of them."""

PARTS: Final = frozenset({"Slice", "Split", "SequenceAt", "Gather", "GatherND"})
"""Ops that take a part of a value."""

BETWEEN: Final = ARRANGING | {QUANTIZE, DEQUANTIZE, "Clip"}
"""Ops that may be between two steps of a rotary embedding."""

TURNING: Final = CUTS | BETWEEN | {"Concat", "Neg", "Mul", "MatMul", "Expand", "Tile", "GatherND"}
"""Ops that turn the features of a value, or a table of angles."""
