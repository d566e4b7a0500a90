"""Copies that convert: `buffer.copy_(x)` where `x` has another dtype, shape or order in memory than the buffer.

Where a buffer ends as a copy, `run_decompositions` takes what was copied for the copy (torch 2.13:
`_remove_unnecessary_copy_op_pass`). Whatever reads the buffer afterwards would compute on integers for floats, on a row
for a matrix, or on columns for rows. So such a copy goes into an alias of its target while torch runs the program
again: then no buffer ends as a copy, and the aliases are taken out afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

__all__ = ["converting", "through_aliases", "without_aliases"]


def converting(program: ExportedProgram) -> list[str]:
    """The names of the nodes, in bodies too, that copy into something unlike what they copy."""
    return [node.name for node in _found(program.graph_module, COPY) if _converts(node)]


def through_aliases(program: ExportedProgram, copies: list[str]) -> ExportedProgram:
    """Another program, in which the nodes `copies` write to an alias."""
    module = copy.deepcopy(program.graph_module)
    for node in _found(module, COPY):
        target = node.args[0]
        if node.name in copies and isinstance(target, Node):
            with node.graph.inserting_before(node):
                alias = node.graph.call_function(ALIAS, (target,))
            alias.meta = dict(target.meta)
            node.update_arg(0, alias)
    _recompile(module)
    return program._update(module, program.graph_signature)


def without_aliases(program: ExportedProgram) -> None:
    """Take the aliases out of `program`, which writes to nothing: each is its argument."""
    module = program.graph_module
    with module._set_replace_hook(program.graph_signature.get_replace_hook()):
        for node in _found(module, ALIAS):
            node.replace_all_uses_with(node.all_input_nodes[0])
            node.graph.erase_node(node)
    _recompile(module)


def _found(module: GraphModule, target: OpOverload) -> list[Node]:
    """The calls of `target`, in bodies too: torch takes those of a region into the graph around it."""
    return [node for one in _graphs(module) for node in one.graph.find_nodes(op="call_function", target=target)]


def _graphs(module: GraphModule) -> Iterator[GraphModule]:
    return (one for one in module.modules() if isinstance(one, GraphModule))


def _recompile(module: GraphModule) -> None:
    for one in _graphs(module):
        one.recompile()


def _converts(node: Node) -> bool:
    target, given = (one.meta.get("val") if isinstance(one, Node) else None for one in node.args[:2])
    if not isinstance(target, torch.Tensor) or not isinstance(given, torch.Tensor):
        return False
    return target.dtype != given.dtype or _laid(target) != _laid(given)


def _laid(tensor: torch.Tensor) -> tuple[str, str]:
    """Sizes and strides as they are written: to compare symbols would bind them."""
    return str(tuple(tensor.shape)), str(tensor.stride())


COPY = torch.ops.aten.copy_.default
ALIAS = torch.ops.aten.alias.default
