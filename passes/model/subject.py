"""A model on trial, with what has been found out about it, so that nothing is found out twice."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from onnx import NodeProto

from passes.model.canonical import Reading, read
from passes.model.reads import live_nodes
from passes.model.validity import what_is_invalid
from passes.model.weights import DetachedModel

__all__ = ["Subject"]


@dataclass(frozen=True)
class Subject:
    """`model`, whose graph does not change any more; names and metadata may."""

    model: DetachedModel

    @property
    def size(self) -> tuple[int, int]:
        """The number of its nodes and of its initializers."""
        return len(self.model.proto.graph.node), len(self.model.proto.graph.initializer)

    @cached_property
    def reading(self) -> Reading:
        return read(self.model)

    @cached_property
    def live(self) -> list[NodeProto]:
        """The nodes that an output depends on."""
        return live_nodes(self.model.proto.graph)

    @cached_property
    def made(self) -> frozenset[str]:
        """The values that those make."""
        return frozenset(name for node in self.live for name in node.output)

    @cached_property
    def invalid(self) -> str:
        """Which of ONNX's rules it breaks; empty for none."""
        return what_is_invalid(self.model)
