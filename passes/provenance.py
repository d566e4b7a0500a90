"""Carry what the exporter knew of a node (torch module, class, source line) across a pass that drops it."""

from __future__ import annotations

from onnx import NodeProto

from passes.weights import DetachedModel

__all__ = ["AUTHOR_KEY", "carry"]

AUTHOR_KEY = "onnxline.pass"
"""The metadata key under which a node made by a pass names that pass."""


def carry(before: DetachedModel, after: DetachedModel, author: str) -> DetachedModel:
    """Give each node of `after` the metadata that its namesake in `before` had, and mark new nodes with `author`.

    A node is the same one if its op type and its name are, or else its op type and its first output. Nodes and values
    keep their names in onnxoptimizer and onnxsim where the op survives. Changes `after.proto`.
    """
    by_name: dict[tuple[str, str], NodeProto] = {}
    by_output: dict[tuple[str, str], NodeProto] = {}
    for node in before.proto.graph.node:
        if node.name:
            by_name[node.op_type, node.name] = node
        by_output[node.op_type, node.output[0]] = node
    for node in after.proto.graph.node:
        origin = by_name.get((node.op_type, node.name)) or by_output.get((node.op_type, node.output[0]))
        known = {entry.key for entry in node.metadata_props}
        if origin is None:
            if AUTHOR_KEY not in known:
                node.metadata_props.add(key=AUTHOR_KEY, value=author)
            continue
        for entry in origin.metadata_props:
            if entry.key not in known:
                node.metadata_props.add(key=entry.key, value=entry.value)
    _carry_model(before, after)
    return after


def _carry_model(before: DetachedModel, after: DetachedModel) -> None:
    known = {entry.key for entry in after.proto.metadata_props}
    after.proto.metadata_props.extend(entry for entry in before.proto.metadata_props if entry.key not in known)
    if not after.proto.graph.quantization_annotation:
        after.proto.graph.quantization_annotation.extend(before.proto.graph.quantization_annotation)
