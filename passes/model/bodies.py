"""The graphs inside of a node: branches of If, bodies of Loop and Scan."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import AttributeProto, GraphProto, NodeProto

__all__ = ["bodies_of", "every_graph", "every_node"]


def bodies_of(attribute: AttributeProto) -> tuple[GraphProto, ...]:
    """The graphs that one attribute holds; none of most."""
    graphs = attribute.graphs
    if attribute.HasField("g"):
        return (attribute.g, *graphs)
    return tuple(graphs) if graphs else ()


def every_graph(graph: GraphProto) -> Iterator[GraphProto]:
    """`graph`, and the bodies of its nodes at any depth."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for body in bodies_of(attribute):
                yield from every_graph(body)


def every_node(graph: GraphProto) -> Iterator[NodeProto]:
    """The nodes of `graph`, each followed by those of its bodies."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for body in bodies_of(attribute):
                yield from every_node(body)
