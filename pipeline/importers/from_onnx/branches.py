"""An If whose condition is known is the branch that it takes: torch exports `squeeze` as one, asking for the shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx
from onnx import helper

__all__ = ["branch_nodes"]


def branch_nodes(node: onnx.NodeProto, taken: bool, fresh: Callable[[str], str]) -> list[onnx.NodeProto]:
    """The nodes of the branch that the If `node` takes, to stand in its place; the model's own are left as they are.

    Initializers become Constant nodes, and the If's outputs are Identities of the branch's. `fresh` gives the name for
    a value of the branch: the branches of two Ifs may use the same one.
    """
    wanted = "then_branch" if taken else "else_branch"
    branch = next(attribute.g for attribute in node.attribute if attribute.name == wanted)
    made = [tensor.name for tensor in branch.initializer] + [name for one in branch.node for name in one.output if name]
    names = {name: fresh(name) for name in made}
    nodes = [
        helper.make_node("Constant", [], [names[tensor.name]], name=tensor.name, value=tensor)
        for tensor in branch.initializer
    ]
    nodes += [_renamed(one, names) for one in branch.node]
    nodes += [
        helper.make_node("Identity", [names.get(inner.name, inner.name)], [outer], name=node.name)
        for inner, outer in zip(branch.output, node.output, strict=True)
        if outer
    ]
    return nodes


def _renamed(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    """A copy under new names, inside of its own branches too; what those make shadows nothing, so says ONNX."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    _rename(copy, names)
    return copy


def _rename(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    node.input[:] = [names.get(name, name) for name in node.input]
    node.output[:] = [names.get(name, name) for name in node.output]
    for attribute in node.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            for inner in graph.node:
                _rename(inner, names)
            for output in graph.output:
                output.name = names.get(output.name, output.name)
