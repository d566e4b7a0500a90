"""`AnalyzedModel`: a model with facts that are computed once; `extract_nodes`: some of its nodes as a model.

Notes on a step compare what a model holds: bytes, nodes, and nodes that do nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import onnx
from onnx import NodeProto, TensorProto, ValueInfoProto

from passes.graph.index import GraphIndex, computed_values, extract, values_read
from passes.graph.inference import EVERY_FLOAT
from passes.graph.op_facts import ONNX_DOMAINS, PRODUCTS
from passes.graph.traversal import every_graph, every_node, read_names
from passes.load import byte_count
from passes.model.canonical import CanonicalModel, canonicalize
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
        is_external = tensor.data_location == TensorProto.EXTERNAL
        if is_external or tensor.data_type not in EVERY_FLOAT or model.is_unread(tensor):
            continue
        array = model.array(tensor)
        for value, unit in ((0, "zero"), (1, "one")):
            if array.size and array.flat[0] == array.flat[-1] == value and (array == value).all():
                units[name] = unit
    return units


@dataclass(frozen=True)
class AnalyzedModel:
    """A model whose graph does not change any more; names and metadata may."""

    model: DetachedModel

    @property
    def size(self) -> tuple[int, int]:
        """The number of its nodes and of its initializers."""
        return len(self.model.proto.graph.node), len(self.model.proto.graph.initializer)

    @cached_property
    def canonical(self) -> CanonicalModel:
        return canonicalize(self.model)

    @cached_property
    def stored_bytes(self) -> int:
        return stored_bytes(self.model)

    @cached_property
    def node_count(self) -> int:
        return count_nodes(self.model)

    @cached_property
    def void_nodes(self) -> VoidNodes:
        return count_void_nodes(self.model)

    @cached_property
    def invalid(self) -> str:
        """The error of ONNX's checker; empty for a valid model."""
        return what_is_invalid(self.model)


def what_is_invalid(model: DetachedModel) -> str:
    """The error of ONNX's checker on `model`, in one line; empty when it is valid.

    An input or output whose type or rank is not declared is valid: the standard allows it, though the checker does not.
    The checker expects as many elements as the shape of a tensor asks for. A stand-in holds fewer, so it becomes an
    input of its type. The metadata of nodes may be most of the graph; the checker ignores it, so it is removed first.
    """
    proto = model.copy_proto()
    graph = proto.graph
    for node in graph.node:
        node.ClearField("metadata_props")
    inputs = GraphIndex(graph).inputs
    stands_in = [tensor for tensor in graph.initializer if model.weight(tensor) is not None]
    for tensor in stands_in:
        if tensor.name not in inputs:
            entry = graph.input.add(name=tensor.name)
            entry.type.tensor_type.elem_type = tensor.data_type
            entry.type.tensor_type.shape.SetInParent()  # required; the sizes are not checked
    names = {tensor.name for tensor in stands_in}
    held = [tensor for tensor in graph.initializer if tensor.name not in names]
    del graph.initializer[:]
    graph.initializer.extend(held)
    for info in (*graph.input, *graph.output):
        kind = info.type.WhichOneof("value")
        if kind is None or (kind == "tensor_type" and not info.type.tensor_type.HasField("shape")):
            info.type.tensor_type.elem_type = info.type.tensor_type.elem_type or onnx.TensorProto.FLOAT
            info.type.tensor_type.shape.SetInParent()
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        return " ".join(str(error).split())
    return ""


def extract_nodes(
    model: DetachedModel, nodes: Sequence[NodeProto], types: Mapping[str, ValueInfoProto]
) -> DetachedModel | None:
    """`nodes` as a model; None when an input or output of it has no known type.

    Values that the nodes only read become inputs; values that they only compute become outputs.
    """
    index = model.index
    read = read_names(nodes)
    inputs = [name for name in values_read(nodes) if name not in index.initializers]
    outputs = [name for name in computed_values(nodes) if name in index.outputs or name not in read]
    if not outputs or any(name not in types for name in (*inputs, *outputs)):
        return None
    typed_inputs, typed_outputs = ([types[name] for name in names] for names in (inputs, outputs))
    return model.with_proto(extract(model.proto, nodes, inputs=typed_inputs, outputs=typed_outputs))
