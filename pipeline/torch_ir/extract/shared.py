"""Weights and buffers with bytes in common that are different tensors: an IR takes each for one of its own.

The halves of one cache have none in common, though they lie in the same memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import getitem

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Node

from pipeline.importers.from_torch.functional import arguments_of, writing, written
from pipeline.importers.from_torch.held import held_tensors
from pipeline.importers.from_torch.hidden import memories_at
from pipeline.importers.from_torch.memory import meet, memory_of
from pipeline.importers.from_torch.operators import operator_of
from pipeline.importers.from_torch.place import line_of
from pipeline.torch_ir.errors import ConversionError

__all__ = ["refuse_written_in_two"]

Held = Mapping[str, tuple[str, torch.Tensor]]
"""{placeholder: the name in the model, the tensor}, of those that lie in one memory with another."""


def refuse_written_in_two(program: ExportedProgram) -> None:
    """
    Raises:
        ConversionError: the program writes to a tensor that has bytes in common with another, so that both change.
    """
    calls = list(writing(program))
    held = _sharing(program) if calls else {}
    if not held:
        return
    top = {node.name: node for node in program.graph.nodes}
    for node in calls:
        for argument in arguments_of(node, written(node)):
            names = _together(held, _roots(argument, top))
            if len(names) > 1:
                raise _in_two(node, names)


def _in_two(node: Node, names: list[str]) -> ConversionError:
    first, *others = names
    return ConversionError(
        f"node {node.name!r} ({line_of(node) or 'no line is known'}) writes to memory that "
        f"{first!r} and {', '.join(map(repr, others))} share; expected one tensor in it: register it once, "
        "or the very same tensor under both names, and take views of it in forward"
    )


def _together(held: Held, written: Collection[str]) -> list[str]:
    """The names of the different tensors that change where those of the placeholders `written` do."""
    found: dict[int, str] = {}
    for changed in (held[name][1] for name in written if name in held):
        for name, tensor in held.values():
            if tensor is changed or _meet(changed, tensor):
                found.setdefault(id(tensor), name)
    return list(found.values())


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = (int(tensor.storage_offset()) * tensor.element_size() for tensor in (one, other))
    return memory_of(one) == memory_of(other) and meet(one, other, second - first)


def _roots(node: Node, top: Mapping[str, Node]) -> set[str]:
    """The placeholders of which `node` is a view, as operators declare it, or as it came out in the trace.

    Some, as `einsum`, give views and do not declare them. A program that was saved and loaded has forgotten what was in
    one memory. An `as_strided` may be a view of all that lies there.
    """
    found: set[str] = set()
    pending = [node]
    for one in pending:  # which grows meanwhile
        if one.op == "placeholder":
            one = top.get(one.name, one)  # that of a body is named as what it stands for outside
        if one.op == "placeholder" and one.name in top:
            found.add(one.name)
        elif one.op == "placeholder" or one.target is AS_STRIDED:
            found |= {name for name, other in top.items() if _in_one(one, other)}
        pending += (other for other in _viewed(one) if other not in pending)
    return found


def _viewed(node: Node) -> list[Node]:
    """What `node` is, or may be, a view of."""
    if node.target is getitem:
        return node.all_input_nodes
    declared = arguments_of(node, operator_of(node.target).viewed) if isinstance(node.target, OpOverload) else []
    return declared or [other for other in node.all_input_nodes if _in_one(node, other)]


def _in_one(one: Node, other: Node) -> bool:
    return not memories_at(one).isdisjoint(memories_at(other))


def _sharing(program: ExportedProgram) -> dict[str, tuple[str, torch.Tensor]]:
    held: dict[str, tuple[str, torch.Tensor]] = {}
    tensors: dict[int, set[int]] = {}
    for name, target, tensor in held_tensors(program):
        if (memory := memory_of(tensor)) is not None:
            held[name] = target, tensor
            tensors.setdefault(memory, set()).add(id(tensor))
    return {name: one for name, one in held.items() if len(tensors[memory_of(one[1]) or 0]) > 1}


AS_STRIDED = torch.ops.aten.as_strided.default
