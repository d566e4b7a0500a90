"""Views that no schema declares: `einsum("ij->ji", x)` shares the memory of `x`, and an idle dropout returns `x`.

When torch functionalizes, it takes the result of such an `einsum` for a new tensor, and makes a copy of the dropout
(torch 2.13), so a write to one of the two tensors no longer reaches the other. So we decompose such an operator into
views that are declared, and replace one that returns its argument by that argument.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils import _pytree as pytree

from pipeline.importers.from_torch.exported_program import calls_in, recompile
from pipeline.importers.from_torch.memory import as_written, memory_of
from pipeline.importers.from_torch.operators import describe_operator

__all__ = ["decompositions", "hidden_views", "memories_at", "without_identities"]


def hidden_views(calls: Iterable[Node], changed: Iterable[Node]) -> list[Node]:
    """Those of `calls` that return an undeclared view of memory that one of the nodes `changed` uses.

    An idle dropout is always among them: torch would copy there.
    """
    memories = frozenset[int]().union(*map(memories_at, changed))
    return [node for node in calls if _idle(node) or (memories & memories_at(node) and _hides(node))]


def decompositions(nodes: Iterable[Node]) -> dict[Any, Callable[..., Any]]:
    """torch's decompositions of the operators of these calls, except of an idle dropout, which is bypassed before."""
    operators = {node.target for node in nodes if not _idle(node)}
    known = torch.export.default_decompositions() if operators else {}
    return {operator: known[operator] for operator in operators if operator in known}


def without_identities(program: ExportedProgram, names: Collection[str]) -> ExportedProgram:
    """A copy of `program` in which, among the nodes `names`, those that return their argument are bypassed, and those
    whose operator has an equivalent that declares its views (DECLARED) call that one."""
    module, signature = copy.deepcopy((program.graph_module, program.graph_signature))
    with module._set_replace_hook(signature.get_replace_hook()):
        for node in [node for node in calls_in(module) if node.name in names]:
            if isinstance(node.target, OpOverload):
                node.target = DECLARED.get(node.target, node.target)
            same = next((one for one in node.all_input_nodes if _idle(node) or _is_same(node, one)), None)
            if same is not None:
                node.replace_all_uses_with(same)
                node.graph.erase_node(node)
    recompile(module)
    return program._update(module, signature)


def memories_at(node: Node) -> frozenset[int]:
    """The storages of the results of `node` in the trace; a program that was saved and loaded does not know them."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return frozenset(memory for leaf in leaves if (memory := memory_of(leaf)) is not None)


def _idle(node: Node) -> bool:
    return node.target is DROPOUT and not (node.args[1] and node.args[2])


def _is_same(node: Node, given: Node) -> bool:
    one, other = node.meta.get("val"), given.meta.get("val")
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return memories_at(node) == memories_at(given) != frozenset() and _view_facts(one) == _view_facts(other)


def _view_facts(tensor: torch.Tensor) -> tuple[str, ...]:
    """What decides how a tensor reads its memory: dtype, conjugation, sign, offset, sizes and strides."""
    return *map(str, (tensor.dtype, tensor.is_conj(), tensor.is_neg(), tensor.storage_offset())), *as_written(tensor)


def _hides(node: Node) -> bool:
    if not isinstance(node.target, OpOverload) or describe_operator(node.target).viewed:
        return False
    return any(memories_at(node) & memories_at(given) for given in node.all_input_nodes)


DROPOUT = torch.ops.aten.dropout.default
"""(input, p, train)"""

DECLARED = {
    torch.ops.aten.unsafe_split.Tensor: torch.ops.aten.split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default: torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.unsafe_chunk.default: torch.ops.aten.chunk.default,
}
"""{operator whose schema hides that it returns views: the equivalent operator that declares them}"""
