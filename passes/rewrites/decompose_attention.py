"""Attention in one operator → MatMul, scale, mask, Softmax, MatMul, each of which a quantizer sees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

import onnx
from onnx import NodeProto

from passes.context import PassContext
from passes.graph.op_facts import opset_of
from passes.graph.traversal import every_node
from passes.rewrites.attention_core import write_core
from passes.rewrites.attention_operators import is_attention, read_attention
from passes.rewrites.graph_edit import GraphEdit
from passes.rewrites.node_writer import GraphTypes, NodeWriter, NotHandledError
from passes.step import Description, PassResult, Step, structure
from passes.structures.view import GraphView
from passes.weights.detached import DetachedModel

OLDEST: Final = 15
"""The opset whose Shape takes `start` and `end`."""

NO_OPERATOR: Final = "no operator of attention"


@dataclass(frozen=True, slots=True)
class DecomposeAttention(Step):
    """Replace the standard's Attention, and onnxruntime's Attention, MultiHeadAttention and GroupQueryAttention.

    ONNX's own function of Attention is not taken: it has some fifty nodes of casts and shape arithmetic, also where all
    sizes are known. What a form that is not handled lacks stands in the report.
    """

    name: str = field(default="decompose-attention", init=False)
    description: ClassVar[Description] = structure(
        "Take attention operators apart into MatMul, scale, mask, Softmax and MatMul"
    )

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        work, changed = model, False
        while True:
            work, reasons, replaced = _replace_attention(work)
            changed = changed or replaced
            if not replaced or not reasons:
                break  # otherwise what was replaced has types now, which may be what the others lacked
        inner = _count_in_bodies(model.proto)
        if inner:
            reasons.append(f"{inner} in bodies or functions")
        why = f"left as they are: {'; '.join(reasons)}" if reasons else None if changed else NO_OPERATOR
        return PassResult(work, changed, why)


def _replace_attention(model: DetachedModel) -> tuple[DetachedModel, list[str], bool]:
    """The model without attention nodes in its main graph, why some stay, and whether any were replaced."""
    indices = [index for index, node in enumerate(model.proto.graph.node) if is_attention(node)]
    if not indices:
        return model, [], False
    opset = opset_of(model.proto)
    if opset < OLDEST:
        old = f"all, since opset {opset} is too old: put {{convert-opset: {{to: {OLDEST}}}}} or later before it"
        return model, [old], False
    view = GraphView(model)
    edit, types = GraphEdit.of(view, second=1), GraphTypes.of(view)
    reasons = []
    for index in indices:
        writer = NodeWriter(view.own[index], edit)
        try:
            write_core(read_attention(writer, types), writer)
        except NotHandledError as reason:
            reasons.append(f"{_name_of(writer.node)}: {reason}")
            continue
        edit.replace_by(writer)
    return (edit.model(), reasons, True) if edit.removed else (model, reasons, False)


def _count_in_bodies(proto: onnx.ModelProto) -> int:
    """How many attention nodes are in bodies or functions."""
    graphs = (proto.graph, *proto.functions)
    every = sum(is_attention(node) for graph in graphs for node in every_node(graph))
    return every - sum(is_attention(node) for node in proto.graph.node)


def _name_of(node: NodeProto) -> str:
    return f"{node.op_type} {(node.name or node.output[0])!r}"
