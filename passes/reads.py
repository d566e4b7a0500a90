"""Which values a node reads, those that its subgraphs capture included."""

from __future__ import annotations

from onnx import NodeProto

__all__ = ["reads_of"]


def reads_of(node: NodeProto) -> list[str]:
    """Names read by `node` or, for If, Loop and Scan, by anything inside of it."""
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            names.extend(name for inner in graph.node for name in reads_of(inner))
            names.extend(output.name for output in graph.output)
    return names
