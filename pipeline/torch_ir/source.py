"""Where the view of an IR comes from: its Graph, at hand or still to be read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from passes.run.gc_pause import collector_paused
from pipeline.ir import Graph
from pipeline.torch_ir.document.alike import alike
from pipeline.torch_ir.document.edited import edited
from pipeline.torch_ir.document.expected import TEXT, refused
from pipeline.torch_ir.document.reading import graph_in, read_graph
from pipeline.torch_ir.nodes import OpNode, Parts, parts_of

__all__ = ["EMPTY", "Source", "named"]

Tensors = Mapping[str, torch.Tensor]


@dataclass(slots=True)
class Source:
    """`found` is the Graph, or the data of a file, which is read when somebody asks for the Graph.

    `shown` is the view that the Graph was read from; None where the Graph was first, and shows what `parts_of` says.
    `handed` are the nodes of the view, as the objects that whoever asked for them has, and the names of their ops.
    """

    found: Graph | Mapping[str, Any]
    shown: Parts | None = None
    handed: list[tuple[OpNode, str]] = field(default_factory=list)
    what: str = TEXT
    """The file that the data is of."""

    def graph(self, constants: Tensors) -> Graph:
        """
        Raises:
            SerializationError: the data is no IR.
        """
        if not isinstance(self.found, Graph):
            with collector_paused():
                self.found = read_graph(self.found, constants, self.what)
        return self.found

    @collector_paused()
    def seen(self, view: Parts, name: str, constants: Tensors, whole: bool) -> Source:
        """This one, where `view` is as it was shown; otherwise that of the Graph `name`, of which it is the view.

        Raises:
            SerializationError: there is no such Graph; the message says where.
        """
        graph = self.graph(constants)
        if alike(self.shown or parts_of(graph), view):
            return self
        with refused("IR, as it was put together", "change that part of it"):
            graph = graph_in(edited(graph, name, view, self.handed), constants, whole)
        return Source(graph, deepcopy(view), named(view.nodes))

    def called(self, name: str, constants: Tensors) -> Source:
        """That of the same Graph by another name."""
        return replace(self, found=replace(self.graph(constants), name=name))


def named(nodes: Iterable[OpNode]) -> list[tuple[OpNode, str]]:
    """Each node with the name that it has now."""
    return [(node, node.name) for node in nodes]


EMPTY = Graph("", (), (), (), ())
