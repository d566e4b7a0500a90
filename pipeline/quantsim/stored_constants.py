"""A model is made ready for quantization: constants of nodes become stored tensors, so that a weight is a weight
wherever the exporter has put it, and values after operators of other domains get the types that onnxruntime infers.
"""

from __future__ import annotations

import onnx
from onnx import NodeProto, TensorProto

from passes.errors import StepFailed
from passes.graph.index import copy_of, replace_entries
from passes.graph.inference import FLOATS, types_of
from passes.graph.op_facts import ONNX_DOMAINS
from passes.weights.detached import DetachedModel, detach


def store_constants(model: DetachedModel) -> DetachedModel:
    """`model` with the floats of its Constant nodes as initializers; names stay. A Constant that is an output stays."""
    outputs = {info.name for info in model.proto.graph.output}
    held = {node.output[0]: tensor for node in model.proto.graph.node if (tensor := _tensor_of(node)) is not None}
    moved = {name: tensor for name, tensor in held.items() if name not in outputs}
    if not moved:
        return model
    proto = model.copy_proto()
    nodes = [node for node in model.proto.graph.node if not moved.keys() & set(node.output)]
    replace_entries(proto.graph.node, nodes)
    added: list[TensorProto] = []
    for name, tensor in moved.items():
        copy = copy_of(tensor)
        copy.name = name
        added.append(copy)
    stored = detach(onnx.ModelProto(graph=onnx.GraphProto(initializer=added)))
    proto.graph.initializer.extend(stored.proto.graph.initializer)
    return DetachedModel(proto, {**model.weights, **stored.weights})


def declare_types(model: DetachedModel) -> DetachedModel:
    """`model` with the types of values that ONNX's inference does not know, such as those after operators of other
    domains, as onnxruntime infers them; `model` itself where onnxruntime does not open it."""
    known = types_of(model.proto)
    unknown = [name for node in model.proto.graph.node for name in node.output if name and name not in known]
    if not unknown:
        return model
    from passes.weights.sessions import Session  # loads onnxruntime, which a target's table does without

    try:
        infos = Session.of(model, unknown).output_infos()
    except StepFailed:
        return model
    proto = model.copy_proto()
    proto.graph.value_info.extend(info for info in infos if info.name in unknown)
    return model.with_proto(proto)


def _tensor_of(node: NodeProto) -> TensorProto | None:
    """The float tensor of a Constant."""
    if node.op_type != "Constant" or node.domain not in ONNX_DOMAINS:
        return None
    tensor = next((entry.t for entry in node.attribute if entry.name == "value"), None)
    return tensor if tensor is not None and tensor.data_type in FLOATS else None
