"""Views of the graphs inside of nodes: branches of If, bodies of Loop and Scan."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import GraphProto, NodeProto, helper

from passes.graph.traversal import bodies_of
from passes.structures.matrices import matrix_of, matrix_values
from passes.structures.view import GraphView, attribute_of


def inner_views(view: GraphView) -> Iterator[GraphView]:
    """A view of each graph inside of the nodes of `view`'s own graph, at any depth, without branches that never run."""
    for node in view.inferred.node:
        dead = _dead_branch(view, node)
        for attribute in node.attribute:
            for body in bodies_of(attribute) if attribute.name != dead else ():
                inner = GraphView(view.model, body, view, _entries(node, body))
                yield inner
                yield from inner_views(inner)


def _dead_branch(view: GraphView, node: NodeProto) -> str:
    """The attribute with the branch of an If that its constant condition never takes; empty where both may run."""
    matrix = matrix_of(view, node.input[0]) if node.op_type == "If" and node.input[0] in view.folded else None
    values = None if matrix is None else matrix_values(view, matrix)
    if values is None or values.size != 1:
        return ""
    return "else_branch" if values.item() else "then_branch"


def _entries(node: NodeProto, body: GraphProto) -> list[NodeProto]:
    """Nodes that stand for how a Loop or Scan hands values to its `body`: a state is what it begins with or what the
    last turn made, and what is scanned is taken from along its axis."""
    count = attribute_of(node, "num_scan_inputs")
    if node.op_type not in ("Loop", "Scan"):
        return []
    given, inner, made = list(node.input), [info.name for info in body.input], [info.name for info in body.output]
    if count is None:  # a Loop, which counts its turns and says whether there is another one
        given, inner, made, count = given[2:], inner[2:], made[1:], 0
    states = len(inner) - count
    held = zip(given[:states], made, inner, strict=False)
    scanned = zip(given[states:], inner[states:], attribute_of(node, "scan_input_axes") or [0] * count, strict=False)
    return [
        *(helper.make_node("Where", ["", first, later], [name]) for first, later, name in held),
        *(helper.make_node("Gather", [whole, ""], [name], axis=axis) for whole, name, axis in scanned),
    ]
