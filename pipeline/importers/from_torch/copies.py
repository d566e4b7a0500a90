"""Copies that convert: `buffer.copy_(x)` where `x` has another dtype, shape or order in memory than the buffer.

Where a buffer ends as a copy, `run_decompositions` takes what was copied for the copy (torch 2.13:
`_remove_unnecessary_copy_op_pass`). Whatever reads the buffer afterwards would compute on integers for floats, on a row
for a matrix, or on columns for rows. So such a copy goes into an alias of its target while torch runs the program
again: then no buffer ends as a copy, and the aliases are taken out afterwards.
"""

from __future__ import annotations

import copy

import torch
from torch.export import ExportedProgram
from torch.fx import Node

__all__ = ["converting", "through_aliases", "without_aliases"]


def converting(program: ExportedProgram) -> list[str]:
    """The names of the nodes that copy into something unlike what they copy."""
    return [node.name for node in program.graph.find_nodes(op="call_function", target=COPY) if _converts(node)]


def through_aliases(program: ExportedProgram, copies: list[str]) -> ExportedProgram:
    """Another program, in which the nodes `copies` write to an alias."""
    module = copy.deepcopy(program.graph_module)
    for node in module.graph.find_nodes(op="call_function", target=COPY):
        if node.name in copies:
            target = node.args[0]
            with module.graph.inserting_before(node):
                alias = module.graph.call_function(ALIAS, (target,))
            alias.meta = dict(target.meta)
            node.update_arg(0, alias)
    module.recompile()
    return program._update(module, program.graph_signature)


def without_aliases(program: ExportedProgram) -> None:
    """Take the aliases out of `program`, which writes to nothing: each is its argument."""
    module = program.graph_module
    with module._set_replace_hook(program.graph_signature.get_replace_hook()):
        for node in module.graph.find_nodes(op="call_function", target=ALIAS):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()


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
