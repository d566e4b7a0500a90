"""Add metadata to a case, since few test models have any, and look for it in the result of a pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import onnx

from passes.graph.traversal import bodies_of

__all__ = ["add_marks", "remove_marks", "what_is_lost"]

KEY: Final = "onnxline.audit"
NODES_FROM: Final = 10
"""The first ir_version in which nodes have metadata."""


def add_marks(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with metadata and doc strings on the model and on each node of the main graph."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.metadata_props.add(key=KEY, value="model")
    copy.doc_string = copy.doc_string or KEY
    copy.graph.doc_string = copy.graph.doc_string or KEY
    for place, node in enumerate(copy.graph.node):
        node.doc_string = node.doc_string or KEY
        if copy.ir_version >= NODES_FROM:
            node.metadata_props.add(key=KEY, value=str(place))
    return copy


def remove_marks(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without metadata and doc strings, for comparing sizes."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.metadata_props[:]
    copy.doc_string = ""
    for graph in _graphs(copy.graph):
        graph.doc_string = ""
        for node in graph.node:
            node.doc_string = ""
            del node.metadata_props[:]
    return copy


def what_is_lost(before: onnx.ModelProto, after: onnx.ModelProto) -> str:
    """Describe the metadata that a marked model has lost. Nodes match by operator and outputs."""
    lost = []
    if not any(entry.key == KEY for entry in after.metadata_props):
        lost.append("the model's metadata")
    if not after.doc_string:
        lost.append("its doc string")
    if not after.graph.doc_string:
        lost.append("the graph's doc string")
    nodes = {(node.op_type, *node.output): node for node in before.graph.node}
    still = [(nodes[key], node) for node in after.graph.node if (key := (node.op_type, *node.output)) in nodes]
    if any(old.metadata_props and not new.metadata_props for old, new in still):
        lost.append("operators' metadata")
    if any(not new.doc_string for _, new in still):
        lost.append("operators' doc strings")
    return ", ".join(lost)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in bodies_of(attribute):
                yield from _graphs(inner)
