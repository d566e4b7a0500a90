"""Weights and buffers that lie in the same memory, and are different tensors: an IR takes each for one of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from operator import getitem
from typing import Any

from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg

from pipeline.importers.from_torch.functional import writing, written
from pipeline.importers.from_torch.memory import memory_of
from pipeline.importers.from_torch.operators import operator_of
from pipeline.importers.from_torch.place import line_of
from pipeline.torch_ir.errors import ConversionError

__all__ = ["refuse_written_in_two"]


def refuse_written_in_two(program: ExportedProgram) -> None:
    """
    Raises:
        ConversionError: the program writes to a tensor of which another is a view, so that both change.
    """
    calls = list(writing(program))
    groups = _sharing(program) if calls else {}
    if not groups:
        return
    traced = _traced(program)
    for node in calls:
        for argument in _arguments(node, written(node)):
            for name in (*_roots(argument), *traced.get(memory_of(argument.meta.get("val")), ())):
                if name in groups:
                    raise _in_two(node, groups[name])


def _in_two(node: Node, names: list[str]) -> ConversionError:
    first, *others = names
    return ConversionError(
        f"node {node.name!r} ({line_of(node) or 'no line is known'}) writes to memory that "
        f"{first!r} and {', '.join(map(repr, others))} share; expected one tensor in it: register it once, "
        "or the very same tensor under both names, and take views of it in forward"
    )


def _roots(node: Node) -> Iterator[str]:
    """The placeholders of which `node` is a view, as operators declare it; those of a body are named as outside."""
    pending = [node]
    for one in pending:  # which grows meanwhile
        if one.op == "placeholder":
            yield one.name
        elif one.target is getitem:
            pending += _nodes(one.args[0])
        elif isinstance(one.target, OpOverload):
            pending += _arguments(one, operator_of(one.target).viewed)


def _arguments(node: Node, names: Collection[str]) -> list[Node]:
    """What `node`, a call of an operator, is given by these names."""
    given = {**dict(zip(operator_of(node.target).arguments, node.args, strict=False)), **node.kwargs}
    return _nodes([given[name] for name in names if name in given])


def _nodes(given: Any) -> list[Node]:
    found: list[Node] = []
    map_arg(given, found.append)
    return found


def _traced(program: ExportedProgram) -> dict[int | None, list[str]]:
    """{memory in the trace: placeholders in it}: some operators, as `einsum`, give views and do not declare them.

    A program that was saved and loaded has forgotten what was in one memory.
    """
    found: dict[int | None, list[str]] = {}
    for node in program.graph.find_nodes(op="placeholder"):
        if (memory := memory_of(node.meta.get("val"))) is not None:
            found.setdefault(memory, []).append(node.name)
    return found


def _sharing(program: ExportedProgram) -> dict[str, list[str]]:
    """{placeholder: the names of the different tensors in its memory}, where there are several."""
    memories: dict[int, dict[int, str]] = {}
    placed: dict[str, int] = {}
    held = {**program.state_dict, **program.constants}
    for spec in program.graph_signature.input_specs:
        tensor = held.get(spec.target or "")
        if (memory := memory_of(tensor)) is not None:
            placed[spec.arg.name] = memory
            memories.setdefault(memory, {}).setdefault(id(tensor), str(spec.target))
    return {name: [*memories[memory].values()] for name, memory in placed.items() if len(memories[memory]) > 1}
