"""Attach kernels to a graph that was built without emitters, so that importers need not know them."""

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
    """`graph` with a kernel for every op whose kind has an emitter; the same graph if none is missing.

    Ops of other kinds stay without a kernel, for `lower` to list.

    Raises:
        Unsupported: an op reads memory, not only elements, and the plan's layout of it is not the traced one.
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
    """Whether `op` is an `as_strided` of a value that was not at the start of its storage, or not contiguous.

    A plan lays such a value out in another way."""
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
"""Views to a plan, but copies with storage of their own in torch."""

CUTS = frozenset({Kind.Slice, Kind.Select, Kind.Split, Kind.Unbind, Kind.Diagonal, Kind.Unfold})
"""Views that may begin in the middle of a storage."""
