"""Is a model valid ONNX? Asked of the graph alone, without the weights."""

from __future__ import annotations

import onnx

from passes.model.weights import DetachedModel

__all__ = ["what_is_invalid"]


def what_is_invalid(model: DetachedModel) -> str:
    """What ONNX's checker says of `model`, in one line; empty when it is valid.

    The checker counts the numbers of a tensor, so stand-ins are shown to it as graph inputs of their type. It does not
    look at the metadata of nodes, which may be most of the graph.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    graph = proto.graph
    for node in graph.node:
        node.ClearField("metadata_props")
    inputs = {info.name for info in graph.input}
    stands_in = [tensor for tensor in graph.initializer if model.weight(tensor) is not None]
    for tensor in stands_in:
        if tensor.name not in inputs:
            entry = graph.input.add(name=tensor.name)
            entry.type.tensor_type.elem_type = tensor.data_type
            entry.type.tensor_type.shape.SetInParent()  # has to be there; nothing looks at the sizes
    names = {tensor.name for tensor in stands_in}
    held = [tensor for tensor in graph.initializer if tensor.name not in names]
    del graph.initializer[:]
    graph.initializer.extend(held)
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        return " ".join(str(error).split())
    return ""
