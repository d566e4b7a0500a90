"""Copies of nodes and initializers, for parts of two models that become one."""

from __future__ import annotations

from typing import Final

from onnx import NodeProto, TensorProto

__all__ = ["NEW", "first_output", "node_of", "tensor_of"]

NEW: Final = "onnxline.new/"
"""Put before the names of the changed model, which may mean other values in the base."""


def node_of(side: str, node: NodeProto) -> NodeProto:
    """A bare copy of `node`, named by its side and its first output."""
    copy = NodeProto()
    copy.CopyFrom(node)
    del copy.metadata_props[:]
    copy.name = f"{side}/{first_output(node)}"
    return copy


def tensor_of(tensor: TensorProto, name: str) -> TensorProto:
    """A copy of `tensor` called `name`."""
    copy = TensorProto()
    copy.CopyFrom(tensor)
    copy.name = name
    return copy


def first_output(node: NodeProto) -> str:
    """What a node can be known by."""
    return next(output for output in node.output if output)
