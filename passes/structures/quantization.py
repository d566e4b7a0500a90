"""Find the structure `qdq`: tensors that are quantized and dequantized before the operators that read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from onnx import NodeProto

from passes.graph.op_facts import ARRANGING, op_of
from passes.structures.candidates import PRODUCTS, Candidate
from passes.structures.view import DEQUANTIZE, NBITS, GraphView


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
    maker = view.producers.get(view.origin_of(start.input[0], ARRANGING))
    return (start, end) if maker is None or op_of(maker) not in MULTIPLYING else (maker, start, end)


def _ends_of_pair(view: GraphView, end: NodeProto) -> tuple[str, ...]:
    """The floats before and after a pair. The integers between may have a type that no output can have."""
    start = view.quantizer_of(end)
    return (end.output[0],) if start is None else (start.input[0], end.output[0])


MULTIPLYING: Final = PRODUCTS | {"ConvTranspose", "Einsum", NBITS}
"""Products that devices compute in integers."""
