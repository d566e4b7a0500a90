"""Attention in one operator → MatMul, scale, mask, Softmax, MatMul, each of which a quantizer sees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

import onnx
from onnx import NodeProto, TensorProto

from passes.context import PassContext
from passes.graph.index import initializers_of, replace_entries
from passes.graph.op_facts import domain_of, opset_of
from passes.graph.traversal import every_node, reads_of
from passes.rewrites.attention_core import write_core
from passes.rewrites.attention_operators import READERS, read_attention
from passes.rewrites.node_writer import GraphTypes, NodeWriter, NotHandledError, names_in
from passes.step import Description, PassResult, Step, structure
from passes.weights.detached import DetachedModel, detach

OLDEST: Final = 15
"""The opset whose Shape takes `start` and `end`."""


@dataclass(frozen=True, slots=True)
class DecomposeAttention(Step):
    """Replace the standard's Attention, and onnxruntime's Attention, MultiHeadAttention and GroupQueryAttention.

    ONNX's own function of Attention is not taken: it has some fifty nodes of casts and shape arithmetic, also where all
    sizes are known. What a form that is not handled lacks stands in the report.
    """

    name: str = field(default="decompose-attention", init=False)
    source: str = field(default="onnxline", init=False)
    description: ClassVar[Description] = structure(
        "Take attention operators apart into MatMul, scale, mask, Softmax and MatMul"
    )

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        proto = model.copy_proto()
        work, changed = model.with_proto(proto), False
        while True:
            replaced, reasons = _replace_attention(work)
            changed = changed or replaced
            if not replaced or not reasons:
                break  # otherwise what was replaced has types now, which may be what the others lacked
        inner = len(_attention_in_bodies(proto))
        if inner:
            reasons.append(f"{inner} in bodies or functions")
        why = f"left as they are: {'; '.join(reasons)}" if reasons else None
        if not changed:
            return PassResult(model, changed=False, why=why)
        new = detach(proto, known=model.weights)
        return PassResult(DetachedModel(proto, {**model.weights, **new.weights}), why=why)


def _replace_attention(model: DetachedModel) -> tuple[bool, list[str]]:
    """Replace the attention nodes of the main graph in place; whether there were any, and why others stay."""
    graph = model.proto.graph
    places = [place for place, node in enumerate(graph.node) if is_attention(node)]
    if not places:
        return False, []
    opset = opset_of(model.proto)
    if opset < OLDEST:
        return False, [
            f"all, since opset {opset} is too old: put {{convert-opset: {{to: {OLDEST}}}}} or later before it"
        ]
    types, taken, constants = GraphTypes.of(model), names_in(model.proto), dict[str, TensorProto]()
    stored = initializers_of(graph)
    written: dict[int, list[NodeProto]] = {}
    reasons = []
    for place in places:
        writer = NodeWriter(graph.node[place], taken, constants)
        try:
            write_core(read_attention(writer, types), writer)
        except NotHandledError as reason:
            reasons.append(f"{_name_of(writer.node)}: {reason}")
            continue
        written[place] = writer.nodes
    replace_entries(graph.node, [new for place, node in enumerate(graph.node) for new in written.get(place, [node])])
    read = {name for node in graph.node for name in reads_of(node)}
    graph.initializer.extend(
        tensor for tensor in constants.values() if tensor.name in read and tensor.name not in stored
    )
    return bool(written), reasons


def is_attention(node: NodeProto) -> bool:
    """Whether `node` is one of the operators that this step takes apart."""
    return (domain_of(node), node.op_type) in READERS


def _attention_in_bodies(proto: onnx.ModelProto) -> list[NodeProto]:
    own = {id(node) for node in proto.graph.node}
    graphs = (proto.graph, *proto.functions)
    return [node for graph in graphs for node in every_node(graph) if is_attention(node) and id(node) not in own]


def _name_of(node: NodeProto) -> str:
    return f"{node.op_type} {(node.name or node.output[0])!r}"
