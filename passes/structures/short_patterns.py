"""Find structures of a few nodes: residuals, embeddings, and quantized tensors.

A residual is a sum of a value and of the output of a sublayer on that value. An embedding is a lookup of rows in a
table of weights. `qdq` are tensors that are quantized and dequantized before the operators that read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from onnx import NodeProto

from passes.graph.inference import EVERY_FLOAT
from passes.graph.op_facts import ARRANGING, MATRIX_PRODUCTS, RECURRENT, attribute_of, op_of
from passes.graph.traversal import reads_of
from passes.structures.candidates import PROJECTION_OPS, Candidate
from passes.structures.view import DEQUANTIZE, NBITS, GraphView, quantized_weight


def find_residuals(view: GraphView) -> Iterator[Candidate]:
    """Sums of two branches, of which one is the value that the other starts from, or just a projection of it.

    A mask or a position that every layer adds comes before its later sums too. But layers do not pass it on: a
    residual on the path from it starts elsewhere.
    """
    past = _Ancestry(view)
    begun: dict[str, str] = {}
    for node in view.nodes:
        if op_of(node) != "Add" or view.folded.intersection(node.input) or _is_score(view, node):
            continue
        for skip, branch in (tuple(node.input), tuple(reversed(node.input))):
            start = past.find_start(skip, branch, begun)
            if start is None or any(past.is_on_the_way(start, inner, branch, begin) for inner, begin in begun.items()):
                continue
            begun[node.output[0]] = start
            yield Candidate(node, (node,), (*(view.source(name) for name in node.input), node.output[0]), computed=2)
            break


class _Ancestry:
    """The ancestors of each value as a bit set, with a bit for each graph input and each node."""

    def __init__(self, view: GraphView) -> None:
        self._view = view
        self._bit: dict[str, int] = {}
        self._past: dict[str, int] = {}
        self._layers: list[tuple[int, int]] = []
        self._curves = 0
        for index, info in enumerate(view.model.proto.graph.input):
            self._bit[info.name] = self._past[info.name] = 1 << index
        shift = len(self._bit)
        for index, node in enumerate(view.nodes):
            bit = 1 << (index + shift)
            past = bit
            for name in reads_of(node):
                past |= self._past.get(name, 0)
            if op_of(node) in LAYERS and not view.folded.isdisjoint(filter(None, node.input)):
                self._layers.append((bit, past))
            elif node.op_type not in LINEAR:
                self._curves |= bit
            for name in node.output:
                self._bit[name], self._past[name] = bit, past

    def find_start(self, skip: str, branch: str, begun: Mapping[str, str]) -> str | None:
        """The value, `skip` or before it, from which a sublayer computes `branch`; None if there is no such value.

        `begun` maps each residual found so far to its start: two sublayers may be parallel.
        """
        view = self._view
        for _ in range(MOST_SHORTCUTS):
            skip = view.source(skip)
            if self._comes_before(skip, branch) and self._has_sublayer(skip, branch):
                return skip
            if skip in begun:
                skip = begun[skip]
                continue
            node = view.producers.get(skip)
            if node is None or op_of(node) not in SHORTCUT:
                return None
            if not self._past.get(branch, 0) & ~self._past[skip] & self._curves:
                return None  # two parallel projections
            data = [name for name in node.input if name and name not in view.folded]
            if len(data) != 1:
                return None
            skip = data[0]
        return None

    def is_on_the_way(self, start: str, inner: str, branch: str, begin: str) -> bool:
        """Whether the residual `inner` is between `start` and `branch` but starts elsewhere."""
        branch = self._view.source(branch)
        between = self._comes_before(start, inner) and (inner == branch or self._comes_before(inner, branch))
        return between and begin != start and not self._comes_before(start, begin)

    def _comes_before(self, name: str, other: str) -> bool:
        other = self._view.source(other)
        return name != other and bool(self._past.get(other, 0) & self._bit.get(name, 0))

    def _has_sublayer(self, name: str, other: str) -> bool:
        """Whether there is a product with weights between the two."""
        start, end = self._bit[name], self._past[self._view.source(other)]
        return any(past & start and end & bit and bit != start for bit, past in self._layers)


def _is_score(view: GraphView, node: NodeProto) -> bool:
    """Whether the sum goes into a softmax: a mask, or a relative position."""
    return any(down.op_type == "Softmax" for down, _ in view.downstream(node.output[0], SCORE))


MOST_SHORTCUTS: Final = 6

LAYERS: Final = PROJECTION_OPS | RECURRENT | {"Einsum", "ConvTranspose"}
"""Ops that make a sublayer, where they read weights."""

LINEAR: Final = MATRIX_PRODUCTS | {
    *("Add", "Sub", "Mul", "Div", "Identity", "Cast", "CastLike", "Reshape", "Transpose", "BatchNormalization", "Conv"),
    *("Constant", "Shape", "Concat", "Slice", "Gather", "Unsqueeze", "Squeeze", "Expand", "Pad"),
}

SHORTCUT: Final = frozenset(
    {*("Conv", "BatchNormalization", "AveragePool", "MaxPool", "Pad", "Slice", "Transpose", "Reshape", "Mul", "Div")}
    | {*("LayerNormalization", "Squeeze", "Unsqueeze", "Concat", "Add", "Sub")}
)
"""Ops of the short branch, which may read weights as well as data: a projection to another width, pooling, a scale."""

SCORE: Final = frozenset(
    {*("Add", "Sub", "Mul", "Div", "Where", "Cast", "CastLike", "Reshape", "Identity", "Min", "Max", "Clip", "Tanh")}
)


def find_embeddings(view: GraphView) -> Iterator[Candidate]:
    """Each Gather on axis 0 of a matrix, or GatherND of its rows. A lookup by constant indices is itself constant;
    `instances_of` drops it."""
    for node in (*view.by_op.get("Gather", ()), *view.by_op.get("GatherND", ())):
        if _takes_rows(view, node) and _is_table(view, node.input[0]):
            yield Candidate(node, (node,), (node.output[0],))


def _takes_rows(view: GraphView, node: NodeProto) -> bool:
    if node.op_type == "Gather":
        return attribute_of(node, "axis", 0) == 0
    return (view.dims(node.input[1]) or ("",))[-1] == 1 and not attribute_of(node, "batch_dims", 0)


def _is_table(view: GraphView, name: str) -> bool:
    quantized = quantized_weight(view, name)
    if quantized is not None:
        return len(quantized.stored.dims) == 2
    table = view.find_weight(name)
    return table is not None and len(table.dims) == 2 and table.data_type in EVERY_FLOAT


def find_pairs(view: GraphView) -> Iterator[Candidate]:
    """Each product with the quantized operands that it reads, and each quantized tensor that no product reads.

    A tensor is quantized where QuantizeLinear and DequantizeLinear form a pair, or DequantizeLinear reads a constant.
    Devices compute products in integers, so the pair has to stay directly before its product. Other consumers may
    be fused with the nodes that follow the pair.
    """
    read: set[str] = set()
    for product in view.nodes:
        if op_of(product) in MULTIPLYING:
            ends = [end for end in (_end_before(view, name) for name in product.input) if end is not None]
            read.update(end.output[0] for end in ends)
            nodes = tuple(node for end in ends for node in _pair_of(view, end))
            if nodes or op_of(product) == NBITS:
                pins = (*(pin for end in ends for pin in _ends_of_pair(view, end)), product.output[0])
                yield Candidate(product, (*nodes, product), pins, name=product.name or product.output[0])
    for end in view.nodes:
        if end.op_type == DEQUANTIZE and end.output[0] not in read:
            nodes = _pair_of(view, end)
            if nodes:
                pins = _ends_of_pair(view, end)
                yield Candidate(end, nodes, pins, name=end.name or end.output[0], may_be_constant=True)


def _end_before(view: GraphView, name: str) -> NodeProto | None:
    """The DequantizeLinear that makes `name`, seen through layout ops."""
    node = view.producers.get(view.origin_of(name, ARRANGING))
    return node if node is not None and node.op_type == DEQUANTIZE else None


def _pair_of(view: GraphView, end: NodeProto) -> tuple[NodeProto, ...]:
    """The pair that a DequantizeLinear ends, after the product whose result the pair rounds. The DequantizeLinear alone
    where it reads a constant; no nodes where another operator makes the integers that it reads."""
    start = view.quantizer_of(end)
    if start is None:
        return (end,) if end.input[0] in view.folded else ()
    producer = view.producers.get(view.origin_of(start.input[0], ARRANGING))
    return (start, end) if producer is None or op_of(producer) not in MULTIPLYING else (producer, start, end)


def _ends_of_pair(view: GraphView, end: NodeProto) -> tuple[str, ...]:
    """The floats before and after a pair. The integers between may have a type that no output can have."""
    start = view.quantizer_of(end)
    return (end.output[0],) if start is None else (start.input[0], end.output[0])


MULTIPLYING: Final = PROJECTION_OPS | {"ConvTranspose", "Einsum", NBITS}
"""Products that devices compute in integers."""
