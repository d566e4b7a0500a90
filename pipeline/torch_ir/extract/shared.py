"""Weights and buffers that lie in the same memory, and are different tensors: an IR takes each for one of its own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Node

from pipeline.importers.from_torch.functional import writes
from pipeline.importers.from_torch.place import line_of
from pipeline.torch_ir.errors import ConversionError

__all__ = ["refuse_written_in_two"]


def refuse_written_in_two(program: ExportedProgram) -> None:
    """
    Raises:
        ConversionError: the program writes to a tensor of which another is a view, so that both change.
    """
    writing = [node for node in program.graph.nodes if _writes(node)]
    groups = _sharing(program) if writing else {}
    for node in writing:
        for name in map(_root, node.all_input_nodes):
            if name in groups:
                first, *others = groups[name]
                raise ConversionError(
                    f"node {node.name!r} ({line_of(node) or 'no line is known'}) writes to memory that "
                    f"{first!r} and {', '.join(map(repr, others))} share; expected one tensor in it: register it once, "
                    "or the very same tensor under both names, and take views of it in forward"
                )


def _writes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and writes(node)


def _root(node: Node) -> str:
    """The placeholder of which `node` is a view, if it is one; views look at their first argument."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    return node.name


def _sharing(program: ExportedProgram) -> dict[str, list[str]]:
    """{placeholder: the names of the different tensors in its memory}, where there are several."""
    memories: dict[int, dict[int, str]] = {}
    placed: dict[str, int] = {}
    for name, target, tensor in _stored(program):
        memory = placed[name] = tensor.untyped_storage()._cdata  # an address would be 0 for everything on meta
        memories.setdefault(memory, {}).setdefault(id(tensor), target)
    return {name: [*memories[memory].values()] for name, memory in placed.items() if len(memories[memory]) > 1}


def _stored(program: ExportedProgram) -> Iterator[tuple[str, str, torch.Tensor]]:
    held = {**program.state_dict, **program.constants}
    for spec in program.graph_signature.input_specs:
        tensor = held.get(spec.target or "")
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            yield spec.arg.name, str(spec.target), tensor
