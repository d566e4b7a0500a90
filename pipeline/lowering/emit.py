"""Fix the kernel calls of a graph that was built without emitters: an importer need not know of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipeline.ir.builder import Emitter
from pipeline.ir.graph import Graph, Op
from pipeline.lowering.emitters import EMITTERS, emitter_of

__all__ = ["with_kernels"]


def with_kernels(graph: Graph, emitters: Mapping[str, Emitter] = EMITTERS) -> Graph:
    """A graph whose ops all have the kernel that their emitter gives; the same graph if nothing is missing.

    Ops of a kind that no emitter knows stay without one, for `lower` to list.
    """
    if all(op.kernel is not None or emitter_of(op.kind, emitters) is None for op in graph.ops):
        return graph

    def fixed(op: Op) -> Op:
        emitter = emitter_of(op.kind, emitters)
        if op.kernel is not None or emitter is None or _reads_storage(graph, op):
            return op
        inputs = [graph.values[vid].spec for vid in op.inputs]
        outputs = [graph.values[vid].spec for vid in op.outputs]
        return replace(op, kernel=emitter(op.attrs, inputs, outputs))

    return replace(graph, ops=tuple(fixed(op) for op in graph.ops))


def _reads_storage(graph: Graph, op: Op) -> bool:
    """An `as_strided` of a value that did not begin its storage, row after row: a plan lays it out otherwise."""
    if op.kind != "aten.as_strided.default":
        return False
    source = graph.values[op.inputs[0]]
    maker = "" if source.producer is None else graph.ops[source.producer].kind
    return source.strides is not None or maker in CUTS


CUTS = frozenset(
    {"aten.slice.Tensor", "aten.select.int", "aten.narrow.default", "aten.split.Tensor", "aten.unbind.int"}
)
"""Views that may begin in the midst of a storage."""
