"""Compute what depends on nothing but constants, once, with onnxruntime."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import onnx
from onnx import NodeProto

from passes.base import Workbench
from passes.canonical import RANDOM_OPS
from passes.reads import reads_of
from passes.sessions import Session
from passes.weights import DetachedModel, detach

__all__ = ["FoldConstants"]

KEEP_OPS: Final = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
"""Folding a dequantization would undo the quantization."""


@dataclass(frozen=True, slots=True)
class FoldConstants:
    """Replace every value that is computed from constants alone by an initializer.

    A result larger than `grow_limit` bytes that is also larger than everything it is computed from stays computed: a
    tiny Expand or Tile may spell a matrix of megabytes.
    """

    grow_limit: int = 2**20
    name: str = field(default="fold_constants", init=False)
    source: str = field(default="onnxline", init=False)

    def apply(self, model: DetachedModel, bench: Workbench) -> DetachedModel:
        excluded: set[str] = set()
        while True:
            nodes = _foldable(model.proto, excluded)
            if not nodes:
                return model
            values = _compute(model, nodes)
            too_large = {name for name, array in values.items() if self._grows(array, nodes, model)}
            if not too_large:
                return _replaced(model, nodes, values)
            excluded |= {node.output[0] for node in nodes if too_large & set(node.output)}

    def _grows(self, array: np.ndarray, nodes: list[NodeProto], model: DetachedModel) -> bool:
        read = {name for node in nodes for name in node.input}
        stored = (model.weight(tensor) for tensor in model.proto.graph.initializer if tensor.name in read)
        return array.nbytes > max(self.grow_limit, sum(weight.data.nbytes for weight in stored if weight))


def _foldable(proto: onnx.ModelProto, excluded: set[str]) -> list[NodeProto]:
    """Nodes computable from constants, in graph order."""
    outputs = {output.name for output in proto.graph.output}
    constants = {tensor.name for tensor in proto.graph.initializer} - {info.name for info in proto.graph.input}
    nodes = []
    for node in proto.graph.node:
        fixed = (
            node.op_type not in RANDOM_OPS | KEEP_OPS
            and not any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute)
            and "Sequence" not in node.op_type
            and "Optional" not in node.op_type
            and node.output[0] not in excluded
            and not outputs & set(node.output)
            and all(name in constants for name in node.input if name)
        )
        if fixed:
            nodes.append(node)
            constants.update(node.output)
    return nodes


def _compute(model: DetachedModel, nodes: list[NodeProto]) -> dict[str, np.ndarray]:
    """The values of `nodes` that somebody else reads."""
    folded = {id(node) for node in nodes}
    others = (node for node in model.proto.graph.node if id(node) not in folded)
    read = {name for node in others for name in reads_of(node)}
    wanted = [name for node in nodes for name in node.output if name in read]
    part = onnx.ModelProto(ir_version=model.proto.ir_version, opset_import=model.proto.opset_import)
    part.functions.extend(model.proto.functions)
    needed = {name for node in nodes for name in node.input}
    part.graph.name = "constants"
    part.graph.initializer.extend(tensor for tensor in model.proto.graph.initializer if tensor.name in needed)
    part.graph.node.extend(nodes)
    return Session(model.with_proto(part), wanted).run({}) if wanted else {}


def _replaced(model: DetachedModel, nodes: list[NodeProto], values: dict[str, np.ndarray]) -> DetachedModel:
    gone = {node.output[0] for node in nodes}
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    stays = [node for node in proto.graph.node if node.output[0] not in gone]
    del proto.graph.node[:]
    proto.graph.node.extend(stays)
    made = onnx.ModelProto()
    made.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in values.items())
    detached = detach(made, known=model.weights)
    proto.graph.initializer.extend(made.graph.initializer)
    read = {name for node in proto.graph.node for name in reads_of(node)} | {o.name for o in proto.graph.output}
    used = [tensor for tensor in proto.graph.initializer if tensor.name in read]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(used)
    return DetachedModel(proto, {**model.weights, **detached.weights})
