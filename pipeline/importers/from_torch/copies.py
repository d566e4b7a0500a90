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

from pipeline.importers.from_torch.bodies import calls_in, recompile
from pipeline.importers.from_torch.memory import as_written

__all__ = ["converting", "through_aliases", "without_aliases"]


def converting(program: ExportedProgram) -> list[str]:
    """The names of the nodes that copy into something unlike what they copy, in regions too: torch takes these into the
    graph around them.
    """
    return [node.name for node in calls_in(program.graph_module) if node.target is COPY and _converts(node)]


def through_aliases(program: ExportedProgram, copies: list[str]) -> ExportedProgram:
    """Another program, in which the nodes `copies` write to an alias."""
    module = copy.deepcopy(program.graph_module)
    for node in list(calls_in(module)):
        if node.target is COPY and node.name in copies:
            target = node.all_input_nodes[0]
            with node.graph.inserting_before(node):
                alias = node.graph.call_function(ALIAS, (target,))
            alias.meta = dict(target.meta)
            node.update_arg(0, alias)
    recompile(module)
    return program._update(module, program.graph_signature)


def without_aliases(program: ExportedProgram) -> None:
    """Take the aliases out of `program`, which writes to nothing: each is its argument."""
    module = program.graph_module
    with module._set_replace_hook(program.graph_signature.get_replace_hook()):
        for node in [node for node in calls_in(module) if node.target is ALIAS]:
            node.replace_all_uses_with(node.all_input_nodes[0])
            node.graph.erase_node(node)
    recompile(module)


def _converts(node: Node) -> bool:
    target, given = (one.meta.get("val") if isinstance(one, Node) else None for one in node.args[:2])
    if not isinstance(target, torch.Tensor) or not isinstance(given, torch.Tensor):
        return False
    return target.dtype != given.dtype or as_written(target) != as_written(given)


COPY = torch.ops.aten.copy_.default
ALIAS = torch.ops.aten.alias.default
