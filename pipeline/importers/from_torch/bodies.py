"""The graphs of a program: its own, and those of the regions and branches inside of it."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule, Node

__all__ = ["bodies_of", "calls_in", "recompile"]


def bodies_of(module: GraphModule) -> Iterator[GraphModule]:
    """`module` itself, and all that it holds, however nested."""
    return (body for body in module.modules() if isinstance(body, GraphModule))


def calls_in(module: GraphModule) -> Iterator[Node]:
    """All calls of operators, in bodies too."""
    return (node for body in bodies_of(module) for node in body.graph.nodes if node.op == "call_function")


def recompile(module: GraphModule) -> None:
    """After a change in some of the graphs."""
    for body in bodies_of(module):
        body.recompile()
