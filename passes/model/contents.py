"""What a model holds that notes on a step compare: bytes, nodes, and nodes that do nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from onnx import NodeProto, TensorProto

from passes.graph.op_facts import ONNX_DOMAINS, PRODUCTS
from passes.graph.traversal import every_graph, every_node
from passes.load import byte_count
from passes.weights.detached import DetachedModel


def stored_bytes(model: DetachedModel) -> int:
    """Bytes of all stored tensors, also of bodies and Constants; a tensor stored under two names counts twice."""
    stored = [tensor for graph in every_graph(model.proto.graph) for tensor in graph.initializer]
    held = [
        attribute.t for node in every_node(model.proto.graph) for attribute in node.attribute if attribute.HasField("t")
    ]
    return sum(map(bytes_of, (*stored, *held)))


def count_nodes(model: DetachedModel) -> int:
    """The nodes of the model, also of bodies and of its own functions."""
    graphs = (model.proto.graph, *model.proto.functions)
    return sum(1 for graph in graphs for _ in every_node(graph))


def bytes_of(tensor: TensorProto) -> int:
    """Bytes of a stored tensor; of texts, those of its message."""
    return tensor.ByteSize() if tensor.data_type == TensorProto.STRING else byte_count(tensor)


FLOATS: Final = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16})

UNIT_OPERANDS: Final = {
    "Add": ("zero", (0, 1)),
    "Sub": ("zero", (1,)),
    "Mul": ("one", (0, 1)),
    "Div": ("one", (1,)),
    "Pow": ("one", (1,)),
}
"""Operator → (the operand value with which it does nothing, the input positions where that value has this effect)."""


@dataclass(frozen=True, slots=True)
class VoidNodes:
    """Nodes that do nothing, since a stored operand is zero or one; a trained model may have other values there."""

    nodes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(operator, the operand value with which it does nothing) → how many such nodes there are."""
    reads: Counter[str] = field(default_factory=Counter)
    """`zero` or `one` → how many node inputs read a stored tensor that holds this value alone."""


def count_void_nodes(model: DetachedModel) -> VoidNodes:
    """The nodes of the main graph that do nothing."""
    units = _stored_units(model)
    found = VoidNodes()
    index = model.index
    made_by, constants = index.producers, {*index.initializers}
    for node in model.proto.graph.node:
        if constants.issuperset(filter(None, node.input)):  # to be folded, whatever the values are
            constants.update(node.output)
            continue
        held = [units.get(name, "") for name in node.input]
        found.reads.update(filter(None, held))
        if node.domain not in ONNX_DOMAINS:
            continue
        if _is_void_batchnorm(node, held, made_by):
            found.nodes[node.op_type, "zero and one"] += 1
            found.reads["zero and one"] += 1
        unit, slots = UNIT_OPERANDS.get(node.op_type, ("", ()))
        if unit and any(slot < len(held) and held[slot] == unit for slot in slots):
            found.nodes[node.op_type, unit] += 1
    return found


def _is_void_batchnorm(node: NodeProto, held: list[str], made_by: dict[str, NodeProto]) -> bool:
    if node.op_type != "BatchNormalization" or held[1:5] != ["one", "zero", "zero", "one"]:
        return False
    producer = made_by.get(node.input[0])
    # After a product a BatchNormalization is folded into the weights, whatever its own values are.
    return producer is None or producer.op_type not in PRODUCTS


def _stored_units(model: DetachedModel) -> dict[str, str]:
    """The stored float tensors of zeros alone, or of ones alone, by name."""
    units = {}
    for name, tensor in model.index.constants.items():
        if tensor.data_type not in FLOATS or model.is_unread(tensor) or tensor.data_location == TensorProto.EXTERNAL:
            continue
        array = model.array(tensor)
        for value, unit in ((0, "zero"), (1, "one")):
            if array.size and array.flat[0] == array.flat[-1] == value and (array == value).all():
                units[name] = unit
    return units
