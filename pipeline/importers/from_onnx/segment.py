"""The first part of some nodes that one plan can run: up to a node whose sizes or kind only a run tells."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.importers.from_onnx.inline import PendingNode, read_names
from pipeline.importers.from_onnx.model import build_graph, importers
from pipeline.importers.from_onnx.resolve import Rules, Scope
from pipeline.importers.from_onnx.source import Stored
from pipeline.ir.graph import DTYPE_BITS, Graph, TensorSpec


@dataclass(frozen=True, slots=True)
class NodeList:
    """Nodes that are run in order, the values that are asked for, and the stored values that all may read."""

    name: str
    nodes: Sequence[PendingNode]
    outputs: Sequence[str]
    stored: Mapping[str, Stored]

    def after(self, nodes: Sequence[PendingNode]) -> NodeList:
        return NodeList(self.name, nodes, self.outputs, self.stored)

    def reads(self) -> list[str]:
        """The names that the nodes read, those in bodies too, and what is asked for."""
        return sorted(read_names([node.proto for node in self.nodes]) | set(self.outputs))


@dataclass(frozen=True, slots=True)
class PlanSegment:
    """A Graph of the first nodes, and what is left."""

    graph: Graph
    constants: Mapping[str, np.ndarray]
    """Values that the nodes of the graph make, and that are known without a run."""
    rest: Sequence[PendingNode]
    """The nodes from the first that is not in the graph on; all of them where that is the very first."""
    needs: Sequence[str]
    """Values whose numbers that node needs."""
    begins: bool
    """Whether the graph has at least the first node."""


def import_segment(part: NodeList, values: Mapping[str, Any], fixed: Collection[str]) -> PlanSegment:
    """The segment at the beginning of `part`, for the shapes of `values`, and for the numbers of those in `fixed`.

    Raises:
        SourceError, Unsupported, UsageError: as `from_onnx`.
    """
    specs = {name: spec for name, value in values.items() if (spec := tensor_spec(value)) is not None}
    scope = Scope(
        name=part.name,
        nodes=part.nodes,
        inputs={name: spec for name, spec in specs.items() if name not in fixed},
        outputs=part.outputs,
        stored=part.stored,
        fixed={name: np.asarray(values[name]) for name in fixed},
        others=frozenset(values) - specs.keys(),
    )
    graph, resolved = build_graph(scope, Rules(importers(), fallback=True, stops=True))
    made = {name for node in resolved.nodes for name in node.proto.output}
    wanted = made & ({*part.outputs} | read_names([node.proto for node in resolved.rest]))
    constants = {name: array for name in wanted if (array := resolved.constant(name)) is not None}
    return PlanSegment(graph, constants, resolved.rest, resolved.needs, bool(resolved.nodes))


def tensor_spec(value: object) -> TensorSpec | None:
    """The spec of an array; None for what the IR does not have: sequences, optionals, strings, types below a byte."""
    if not isinstance(value, np.ndarray) or value.dtype.name not in DTYPE_BITS:
        return None
    return TensorSpec(value.shape, value.dtype.name)
