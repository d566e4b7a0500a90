"""Nodes that a step removed since their stored values are zero or one, whatever the step is called.

Random weights have zero biases, and a trained model has not, so such a count is not what a trained model gives.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from onnx import NodeProto, TensorProto

from passes.graph.op_facts import ONNX_DOMAINS, PRODUCTS
from passes.suggest import plural
from passes.weights.detached import DetachedModel

FLOATS: Final = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16})

UNIT_OPERANDS: Final = {
    "Add": ("zero", (0, 1)),
    "Sub": ("zero", (1,)),
    "Mul": ("one", (0, 1)),
    "Div": ("one", (1,)),
    "Pow": ("one", (1,)),
}
"""Operator → the operand that makes it void, and where that may stand."""


def describe_void_nodes(before: DetachedModel, after: DetachedModel) -> tuple[str, ...]:
    """A sentence for each operator of which `before` has nodes that do nothing, and `after` fewer.

    A zero bias that has become an operand of another node is still read, so its Add counts as fused and not as removed.
    """
    had, has = _count(before), _count(after)
    sentences = []
    freed = had.reads - has.reads
    for (op_type, unit), count in (had.nodes - has.nodes).items():
        removed = min(count, freed[unit])
        freed[unit] -= removed
        if removed:
            what = "values are" if op_type == "BatchNormalization" else "operand is"
            whose = "its" if removed == 1 else "their"
            sentences.append(f"{plural(removed, f'{op_type} node')} removed since {whose} stored {what} {unit}")
    return tuple(sentences)


@dataclass(frozen=True, slots=True)
class _VoidNodes:
    nodes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(operator, the value that makes it void) → how many."""
    reads: Counter[str] = field(default_factory=Counter)
    """The value → how often a stored tensor of nothing else is read."""


def _count(model: DetachedModel) -> _VoidNodes:
    units = _stored_units(model)
    found = _VoidNodes()
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
    # Behind a product it is put into the weights, whatever its own values are.
    return producer is None or producer.op_type not in PRODUCTS


def _stored_units(model: DetachedModel) -> dict[str, str]:
    """The stored float tensors of zeros alone, or of ones alone, by name."""
    units = {}
    for name, tensor in model.index.constants.items():
        if tensor.data_type not in FLOATS or model.is_unread(tensor) or tensor.data_location == TensorProto.EXTERNAL:
            continue
        array = model.array(tensor)
        for value, unit in ((0, "zero"), (1, "one")):
            if array.size and array.flat[0] == value and (array == value).all():
                units[name] = unit
    return units
