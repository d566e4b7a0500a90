"""Take a node out of the middle of a model: who read what it makes reads what it read."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import ModelProto, NodeProto

from passes.graph.traversal import bodies_of, live_nodes, reads_of
from passes.model.analysis import what_is_invalid
from passes.weights.detached import DetachedModel

__all__ = ["shortened"]


def shortened(model: DetachedModel) -> Iterator[DetachedModel]:
    """Valid models that lack one node of `model`, or two in a row (a Reshape and a Transpose, say): in place of what
    the second one makes stands one of the values that the first one read.

    The types of outputs are inferred anew, and what nobody reads any more goes too.
    """
    graph = model.proto.graph
    makers = {name: node for node in graph.node for name in node.output}
    outputs = {info.name for info in graph.output}
    for node in graph.node:
        if not outputs.isdisjoint(node.output):
            continue
        near = [name for name in node.input if name]
        far = [name for one in near if one in makers for name in makers[one].input if name]
        for name in dict.fromkeys((*near, *far)):
            shorter = model.with_proto(_without(model.proto, node.output[0], name))
            if _is_sound(shorter):
                yield shorter


def _without(source: ModelProto, value: str, name: str) -> ModelProto:
    """`source`, in which `name` is read in place of `value`."""
    proto = ModelProto()
    proto.CopyFrom(source)
    for node in proto.graph.node:
        _read_instead(node, value, name)
    kept = live_nodes(proto.graph)[::-1]
    read = {one for each in kept for one in reads_of(each)}
    graph = onnx.GraphProto(name=source.graph.name)
    graph.node.extend(kept)
    graph.input.extend(info for info in proto.graph.input if info.name in read)
    graph.initializer.extend(tensor for tensor in proto.graph.initializer if tensor.name in read)
    graph.output.extend(onnx.ValueInfoProto(name=info.name) for info in proto.graph.output)
    proto.graph.CopyFrom(graph)
    return proto


def _read_instead(node: NodeProto, old: str, new: str) -> None:
    node.input[:] = [new if name == old else name for name in node.input]
    for attribute in node.attribute:
        for body in bodies_of(attribute):
            for inner in body.node:
                _read_instead(inner, old, new)


def _is_sound(model: DetachedModel) -> bool:
    """Whether all types fit together; gives the outputs theirs."""
    try:
        inferred = onnx.shape_inference.infer_shapes(model.proto, check_type=True, strict_mode=True).graph
    except Exception:  # it does not say which
        return False
    if not all(info.type.tensor_type.HasField("shape") for info in inferred.output):
        return False
    del model.proto.graph.output[:]
    model.proto.graph.output.extend(inferred.output)
    return not what_is_invalid(model)
