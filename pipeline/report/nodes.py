"""The nodes of a model as rows of a table."""

from __future__ import annotations

import onnx
from onnx import NodeProto

from passes.provenance import annotations_of, known_as, module_path_of
from passes.structures.view import GraphView
from pipeline.report.pictures import NodeRow
from pipeline.report.subgraph import op_label, shape_text

__all__ = ["node_rows", "value_types"]


def node_rows(view: GraphView) -> tuple[NodeRow, ...]:
    """One row a node, in graph order; those in the bodies of If, Loop and Scan are not among them."""
    return tuple(_row(node, view) for node in view.nodes)


def _row(node: NodeProto, view: GraphView) -> NodeRow:
    shapes = tuple(_typed(view, name) for name in node.output if name)
    place = module_path_of(node)
    module = None if place is None else place.paths[-1] if place.paths else ""
    inputs, outputs = tuple(filter(None, node.input)), tuple(filter(None, node.output))
    return NodeRow(known_as(node), op_label(node), shapes, module, annotations_of(node).author, inputs, outputs)


def value_types(view: GraphView) -> dict[str, str]:
    """dtype and shape of what nodes read and none of them makes."""
    made = {name for node in view.nodes for name in node.output}
    names = dict.fromkeys(name for node in view.nodes for name in node.input if name and name not in made)
    stored = {tensor.name: tensor for tensor in view.model.proto.graph.initializer}
    return {name: _stored(stored[name]) if name in stored else _typed(view, name) for name in names}


def _stored(tensor: onnx.TensorProto) -> str:
    dtype = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
    return f"{dtype} {'×'.join(map(str, tensor.dims)) or 'scalar'}"


def _typed(view: GraphView, name: str) -> str:
    """`float 1×197×768`."""
    info = view.types.get(name)
    dtype = info.type.tensor_type.elem_type if info is not None else 0
    words = [onnx.TensorProto.DataType.Name(dtype).lower() if dtype else "", shape_text(view, name)]
    return " ".join(filter(None, words)) or "?"
