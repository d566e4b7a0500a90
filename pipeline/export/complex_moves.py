"""Operators that only move elements, on complex tensors: torch's exporter translates few of them.

It holds a complex tensor as its real and imaginary parts in a last axis of 2. So the same move of `view_as_real` is the
move of the complex tensor, and torch's exporter has a form for each of these steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

__all__ = ["move_complex_as_real"]


def move_complex_as_real(program: ExportedProgram) -> None:
    """Replace, in place, each operator of `MOVES` on a complex tensor by the same on its parts."""
    for graph in _graphs(program):
        for node in list(graph.nodes):
            move = MOVES.get(node.target) if node.op == "call_function" else None
            if move is not None and _is_complex(node.args[0]):
                _replace(graph, node, move)


def _graphs(program: ExportedProgram) -> list[Graph]:
    modules = program.graph_module.modules()
    return [module.graph for module in modules if isinstance(module, torch.fx.GraphModule)]


def _is_complex(value: Any) -> bool:
    held = value.meta.get("val") if isinstance(value, Node) else None
    return isinstance(held, torch.Tensor) and held.is_complex() and not held.is_conj()  # which has no parts to view


def _replace(graph: Graph, node: Node, move: Callable[[int, tuple[Any, ...]], tuple[Any, ...]]) -> None:
    source, *rest = node.args
    assert isinstance(source, Node)
    moved = move(source.meta["val"].ndim, tuple(rest))
    with graph.inserting_before(node):
        parts = graph.call_function(torch.ops.aten.view_as_real.default, (source,))
        result = graph.call_function(node.target, (parts, *moved))  # type: ignore[arg-type]
        whole = graph.call_function(torch.ops.aten.view_as_complex.default, (result,))
    for made, value in (
        (parts, torch.view_as_real(source.meta["val"])),
        (result, torch.view_as_real(node.meta["val"])),
        (whole, node.meta["val"]),
    ):
        made.meta = {**node.meta, "val": value}
    node.replace_all_uses_with(whole)
    graph.erase_node(node)


MOVES: Final[Mapping[Any, Callable[[int, tuple[Any, ...]], tuple[Any, ...]]]] = {
    torch.ops.aten.unsqueeze.default: lambda rank, rest: (rest[0] % (rank + 1),),
    torch.ops.aten.select.int: lambda rank, rest: (rest[0] % rank, *rest[1:]),
    torch.ops.aten.index_select.default: lambda rank, rest: (rest[0] % rank, *rest[1:]),
    torch.ops.aten.index.Tensor: lambda rank, rest: rest,
    torch.ops.aten.expand.default: lambda rank, rest: ([*rest[0], 2],),
    torch.ops.aten.repeat.default: lambda rank, rest: ([*rest[0], 1],),
}
"""Operator → from the complex tensor's rank and the other arguments, those for its parts."""
