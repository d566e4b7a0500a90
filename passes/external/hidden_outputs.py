"""Outputs without a shape, which onnxsim refuses: for the time of its call a node of an operator that no pass knows
reads each of them, and the output of that node is the model's."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from onnx import ValueInfoProto, helper

from passes.errors import StepFailed
from passes.external.pieces import LEAVES, OUTSIDE
from passes.graph.index import GraphIndex, delete_named, replace_all_uses_with, replace_entries
from passes.weights.detached import DetachedModel

DOMAIN: Final = "onnxline.outputs"


def hide_outputs(model: DetachedModel, reshaped: Container[str] = ()) -> DetachedModel:
    """`model` with a scalar of a node of `DOMAIN` in place of each output that has no shape; itself if all have one.

    Raises:
        StepFailed: an input has no shape, and is not among `reshaped`, the inputs that onnxsim is to give one.
    """
    for info in model.index.required_inputs.values():
        if not _has_shape(info) and info.name not in reshaped:
            raise StepFailed(
                f"the input {info.name!r} has no shape, which onnxsim refuses; run fix-shapes before it, with a shape "
                f"for {info.name!r}"
            )
    if all(map(_has_shape, model.proto.graph.output)):
        return model
    proto = model.copy_proto()
    graph = proto.graph
    proto.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    for output in graph.output:
        if _has_shape(output):
            continue
        name, outside = output.name, f"{output.name}{OUTSIDE}"
        graph.value_info.append(output)
        graph.node.append(helper.make_node(LEAVES, [name], [outside], name=name, domain=DOMAIN))
        output.CopyFrom(helper.make_tensor_value_info(outside, 1, []))
    return model.with_proto(proto)


def show_outputs(before: DetachedModel, after: DetachedModel) -> DetachedModel:
    """`after`, which a library made of `hide_outputs(before)`, with the outputs of `before`. The value that the node of
    an output reads gets the output's name, unless that value has to keep its own; then an Identity copies it."""
    if all(map(_has_shape, before.proto.graph.output)):
        return after
    proto = after.copy_proto()
    graph = proto.graph
    declared, types = before.index.outputs, after.index.types
    for output in graph.output:
        name = output.name.removesuffix(OUTSIDE)
        if name in declared and output.name not in declared:
            output.CopyFrom(types.get(name, declared[name]))
    for node in [node for node in graph.node if node.domain == DOMAIN]:
        index, inside, name = GraphIndex(graph), node.input[0], node.output[0].removesuffix(OUTSIDE)
        if inside != name and (inside not in index.producers or inside in index.outputs):
            node.CopyFrom(helper.make_node("Identity", [inside], [name]))
            continue
        graph.node.remove(node)
        for producer in index.producers.values() if inside != name else ():
            producer.output[:] = [name if output == inside else output for output in producer.output]
        replace_all_uses_with(graph.node, {inside: name})
        delete_named(graph.value_info, {inside, name})
    replace_entries(proto.opset_import, [entry for entry in proto.opset_import if entry.domain != DOMAIN])
    return after.with_proto(proto)


def _has_shape(info: ValueInfoProto) -> bool:
    """Whether onnxsim takes the declaration of an input or output: only that of a tensor has to have a shape."""
    kind, tensor = info.type.WhichOneof("value"), info.type.tensor_type
    return kind is not None and (kind != "tensor_type" or bool(tensor.elem_type and tensor.HasField("shape")))
