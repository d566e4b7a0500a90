"""How nodes are spoken of."""

from __future__ import annotations

from onnx import NodeProto

from passes.diff.found import NodeLabel
from passes.provenance.places import place_of

__all__ = ["label_of"]


def label_of(node: NodeProto) -> NodeLabel:
    place = place_of(node)
    name = node.name or next((name for name in node.output if name), "")
    op = f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
    return NodeLabel(op, name, place.paths[-1] if place is not None and place.paths else "")
