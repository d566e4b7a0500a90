"""Who reads what: the values of a node, and the nodes that a graph's outputs depend on."""

from __future__ import annotations

from typing import Final

from onnx import GraphProto, NodeProto

from passes.model.bodies import bodies_of

__all__ = ["SIZES", "live_nodes", "reads_of"]


def reads_of(node: NodeProto) -> list[str]:
    """Names read by `node` or, for If, Loop and Scan, by what is inside of it; what is made there is not among them."""
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        for graph in bodies_of(attribute):
            names.extend(_from_outside(graph))
    return names


def _from_outside(graph: GraphProto) -> list[str]:
    read = [name for node in graph.node for name in reads_of(node)]
    own = {name for node in graph.node for name in node.output}
    own.update(entry.name for entry in (*graph.input, *graph.initializer))
    return [name for name in (*read, *(output.name for output in graph.output)) if name not in own]


def live_nodes(graph: GraphProto, *, by_numbers: bool = False) -> list[NodeProto]:
    """The nodes that an output depends on, last first. onnxoptimizer's fusions leave the others behind.

    Args:
        by_numbers: leave out those of which no more than the shape counts.
    """
    wanted = {output.name for output in graph.output}
    live = []
    for node in reversed(list(graph.node)):  # to ask the graph for each by its place takes longer
        if not wanted.isdisjoint(node.output):
            live.append(node)
            if not (by_numbers and node.op_type in SIZES):
                wanted.update(reads_of(node))
    return live


SIZES: Final = frozenset({"Shape", "Size"})
"""To ask for a size is not to compute with a value."""
