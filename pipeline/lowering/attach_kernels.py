"""Fix the kernel calls of a graph that was built without emitters: an importer need not know of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipeline.errors import Unsupported
from pipeline.ir.builder import Emitter
from pipeline.ir.graph import Graph, KernelSpec, Op
from pipeline.lowering.aten import AS_STRIDED, as_view
from pipeline.lowering.kinds import Kind
from pipeline.lowering.tables import EMITTERS, emitter_of

__all__ = ["with_kernels"]


def with_kernels(graph: Graph, emitters: Mapping[str, Emitter] = EMITTERS) -> Graph:
    """A graph whose ops all have the kernel that their emitter gives; the same graph if nothing is missing.

    Ops of a kind that no emitter knows stay without one, for `lower` to list.

    Raises:
        Unsupported: an op reads memory, and not only elements, where a plan lays it out otherwise than the trace.
    """
    if all(op.kernel is not None or emitter_of(op.kind, emitters) is None for op in graph.ops):
        return graph

    def attach(op: Op) -> Op:
        emitter = emitter_of(op.kind, emitters)
        if op.kernel is not None or emitter is None:
            return op
        if _reads_storage(graph, op):
            raise Unsupported(_storage_message(graph, op))
        inputs = [graph.values[vid].spec for vid in op.inputs]
        outputs = [graph.values[vid].spec for vid in op.outputs]
        return replace(op, kernel=emitter(op.attrs, inputs, outputs))

    return replace(graph, ops=tuple(attach(op) for op in graph.ops))


def _reads_storage(graph: Graph, op: Op) -> bool:
    """An `as_strided` of a value that did not begin its storage, row after row: a plan lays it out otherwise."""
    if op.kind != AS_STRIDED:
        return False
    while True:
        value = graph.values[op.inputs[0]]
        if value.strides is not None or value.producer is None:
            return value.strides is not None
        op = graph.ops[value.producer]
        view = _view(graph, op)
        if view is None or op.kind in COPIES:
            return False
        if Kind(view.kind_id) in CUTS:
            return True


def _storage_message(graph: Graph, op: Op) -> str:
    source = graph.values[op.inputs[0]]
    lay = "began within another tensor" if source.strides is None else f"had the strides {list(source.strides)}"
    return (
        f"op {op.name!r}, {op.kind}, counts through the memory of {source.name!r}, which {lay} in the trace; a plan "
        "holds elements, and neither gaps nor neighbours: use slices in its place, or run "
        "the graph by the plain reference"
    )


def _view(graph: Graph, op: Op) -> KernelSpec | None:
    inputs, outputs = ([graph.values[vid].spec for vid in vids] for vids in (op.inputs, op.outputs))
    return as_view(op.kind, op.attrs, inputs, outputs)


COPIES = frozenset({"aten.clone.default", "aten._to_copy.default", "aten.lift_fresh_copy.default"})
"""Views to a plan, and the beginning of a storage in torch."""

CUTS = frozenset({Kind.Slice, Kind.Select, Kind.Split, Kind.Unbind, Kind.Diagonal, Kind.Unfold})
"""Views that may begin in the midst of a storage."""
