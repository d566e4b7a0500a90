"""The graphs inside of a node: branches of If, bodies of Loop and Scan."""

from __future__ import annotations

from onnx import AttributeProto, GraphProto

__all__ = ["bodies_of"]


def bodies_of(attribute: AttributeProto) -> tuple[GraphProto, ...]:
    """The graphs that one attribute holds; none of most."""
    return (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs)
