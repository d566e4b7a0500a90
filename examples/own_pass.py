"""Two passes of one's own, which `configs/own_pass.yaml` names: a class with options, and a function."""

from __future__ import annotations

from typing import ClassVar

import onnx
from onnx import numpy_helper


class ScaleQuery:
    """(Q·K)·s → (Q·s)·K, which multiplies less where a sequence is longer than a head is wide.

    It looks at operators only, so it gets the model without its weights, whatever they weigh.
    """

    name: ClassVar[str] = "scale_query"
    reads: ClassVar[str] = "structure"

    def __init__(self, op: str = "Mul") -> None:
        self.op = op

    def apply(self, model: onnx.ModelProto) -> onnx.ModelProto:
        made = {name: node for node in model.graph.node for name in node.output}
        constants = {tensor.name for tensor in model.graph.initializer if not tensor.dims}
        for scale in model.graph.node:
            if scale.op_type != self.op or scale.input[1] not in constants:
                continue
            product = made.get(scale.input[0])
            if product is None or product.op_type != "MatMul" or _readers(model, product.output[0]) != 1:
                continue
            query, result = product.input[0], scale.output[0]
            scale.input[0], scale.output[0] = query, f"{result}_query"
            product.input[0], product.output[0] = scale.output[0], result
        return model  # onnxline puts the nodes in order


def fold_scale(model: onnx.ModelProto, *, into: str) -> onnx.ModelProto:
    """Multiply the scale into a weight, ahead of time. It needs the numbers, so it gets the whole model."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    [scale] = [node for node in model.graph.node if node.op_type == "Mul"]
    folded = numpy_helper.to_array(tensors[into]) * numpy_helper.to_array(tensors[scale.input[1]])
    tensors[into].CopyFrom(numpy_helper.from_array(folded, into))
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            if name == scale.output[0]:
                node.input[place] = scale.input[0]
    model.graph.node.remove(scale)
    return model


def _readers(model: onnx.ModelProto, value: str) -> int:
    read = [name for node in model.graph.node for name in node.input]
    return (read + [output.name for output in model.graph.output]).count(value)
