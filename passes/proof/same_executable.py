"""Whether two models are the same to a runtime, whatever their nodes are called and whoever made them."""

from __future__ import annotations

from onnx import GraphProto, ModelProto, NodeProto

__all__ = ["is_same_executable"]


def is_same_executable(one: ModelProto, other: ModelProto) -> bool:
    """Whether both have the same nodes in the same order, on the same values, with the same declared types.

    More than to compute the same: of two models that do, a runtime may refuse one for a type that it declares.
    """
    return one is other or _said(one) == _said(other)


def _said(model: ModelProto) -> tuple[object, ...]:
    graph = model.graph
    opsets = sorted((entry.domain, entry.version) for entry in model.opset_import)
    functions = [function.SerializeToString(deterministic=True) for function in model.functions]
    return model.ir_version, opsets, functions, *_types(graph), _stored(graph), list(map(_node, graph.node))


def _types(graph: GraphProto) -> list[dict[str, bytes]]:
    fields = (graph.input, graph.output, graph.value_info)
    return [{info.name: info.type.SerializeToString(deterministic=True) for info in infos} for infos in fields]


def _stored(graph: GraphProto) -> dict[str, bytes]:
    return {tensor.name: tensor.SerializeToString(deterministic=True) for tensor in graph.initializer}


def _node(node: NodeProto) -> tuple[object, ...]:
    attributes = {one.name: one.SerializeToString(deterministic=True) for one in node.attribute}
    return node.op_type, node.domain, node.overload, list(node.input), list(node.output), attributes
