"""Nodes that another runtime computes: the op holds the whole node as data."""

from __future__ import annotations

import json

from google.protobuf import json_format

from pipeline.importers.from_onnx.inline import PendingNode
from pipeline.importers.from_onnx.node import Node
from pipeline.ir.graph import Attr


def import_fallback(node: Node, pending: PendingNode) -> None:
    """An op `OnnxNode` with the inputs of the node that are given; its attributes say which are left out."""
    proto = pending.proto
    given = tuple(bool(name) for name in proto.input)
    encoded = json_format.MessageToDict(proto, preserving_proto_field_name=True)
    for field in ("input", "output", "name", "metadata_props", "doc_string"):
        encoded.pop(field, None)
    attrs: dict[str, Attr] = {
        "op": node.kind,
        "opset": pending.opset,
        "node": json.dumps(encoded, sort_keys=True, separators=(",", ":")),
        "inputs": tuple(map(int, given)),
        "outputs": tuple(int(bool(name)) for name in node.output_names),
    }
    names = [name for name in node.output_names if name]
    node.make("OnnxNode", node.operands(), [(name, node.spec_of(name)) for name in names], attrs)
