"""Results in the order that they had in the trace: what torch's attention makes lies head by head within each token.

A plan keeps values row after row. So a result whose traced strides are those of a transposed tensor becomes two ops:
the operator itself, whose result has its axes in the order of memory, and a Transpose of it, which costs nothing. Then
the operator writes as it writes in eager torch, what reads it finds the strides that it finds there, and a reshape that
is a view there is one here.

Inputs and stored values lie as they lay in the trace anyhow (`pipeline.lowering.layout`). An `as_strided` of one, which
counts through its memory, gets its axes in the order of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.ir.builder import GraphFacts, ValueDecl, assemble
from pipeline.ir.graph import Attr, Graph, Op, Role, TensorSpec, Value
from pipeline.lowering.aten.views import as_view

__all__ = ["AS_STRIDED", "ORDERS", "has_permuted_results", "in_traced_order", "memory_order"]

AS_STRIDED = "aten.as_strided.default"

ORDERS = "orders of axes"
"""An attribute that no operator has: for each result the permutation that makes it of what is stored, or none."""


def in_traced_order(graph: Graph) -> Graph:
    """The same values under the same vids; the stored ones come after them. Bodies are rewritten too."""
    stubs = [ValueDecl(value.name, value.spec, value.role, value.strides) for value in graph.values]
    ops: list[Op] = []
    for op in graph.ops:
        op = _read_in_memory_order(graph, replace(op, bodies=tuple(map(in_traced_order, op.bodies))), stubs, ops)
        outs = [graph.values[vid] for vid in op.outputs]
        orders = [memory_order(out) for out in outs] if _is_computed(stubs, op, outs) else []
        if not any(orders):
            ops.append(replace(op, oid=len(ops)))
            continue
        stored = [
            _declare_stored(stubs, vid, order) if order else vid for vid, order in zip(op.outputs, orders, strict=True)
        ]
        back = tuple(() if order is None else _inverse(order) for order in orders)
        attrs: dict[str, Attr] = {**op.attrs, ORDERS: back}
        ops.append(replace(op, oid=len(ops), outputs=tuple(stored), attrs=attrs))
        for made, vid, perm in zip(stored, op.outputs, back, strict=True):
            if made != vid:
                ops.append(Op(len(ops), "Transpose", (made,), (vid,), {"perm": perm}, name=op.name, origin=op.origin))
    payloads = {graph.values[vid].name: payload for vid, payload in graph.payloads.items()}
    facts = GraphFacts(graph.updates, graph.sources, graph.dims, graph.guards)
    return assemble(graph.name, stubs, ops, graph.inputs, graph.outputs, payloads, facts=facts)


def has_permuted_results(op: Op) -> bool:
    """Whether a result of `op` is stored with its axes in another order."""
    orders = op.attrs.get(ORDERS, ())
    return isinstance(orders, tuple) and any(orders)


def _read_in_memory_order(graph: Graph, op: Op, stubs: list[ValueDecl], ops: list[Op]) -> Op:
    """`op`; an `as_strided` of a given value that lay in another order counts through a Transpose of it."""
    given = graph.values[op.inputs[0]] if op.inputs else None
    if op.kind != AS_STRIDED or given is None or given.producer is not None:
        return op
    order = memory_order(given)
    if order is None:
        return op
    rows = _declare_stored(stubs, given.vid, order)
    ops.append(Op(len(ops), "Transpose", (given.vid,), (rows,), {"perm": order}, name=op.name, origin=op.origin))
    return replace(op, inputs=(rows, *op.inputs[1:]))


def _is_computed(stubs: Sequence[ValueDecl], op: Op, outs: Sequence[Value]) -> bool:
    """Views have no storage of their own to put in order."""
    if not op.kind.startswith("aten.") or not all(out.spec.is_static for out in outs):
        return False
    ins = [stubs[vid].spec for vid in op.inputs]
    return as_view(op.kind, op.attrs, ins, [out.spec for out in outs]) is None


def memory_order(value: Value) -> tuple[int, ...] | None:
    """The axes of `value`, outermost in memory first, where that is another order and leaves no gaps.

    None for every other value, one of named sizes or strides among them.
    """
    if value.strides is None or not value.spec.is_static or not value.spec.numel:
        return None
    sizes, strides = value.spec.sizes, value.strides
    order = sorted(range(len(sizes)), key=lambda axis: (-int(strides[axis]), axis))
    step = 1
    for axis in reversed(order):
        if sizes[axis] != 1 and strides[axis] != step:
            return None
        step *= sizes[axis]
    return None if order == list(range(len(sizes))) else tuple(order)


def _declare_stored(stubs: list[ValueDecl], vid: int, order: Sequence[int]) -> int:
    stub = stubs[vid]
    spec = TensorSpec(tuple(stub.spec.shape[axis] for axis in order), stub.spec.dtype, stub.spec.device)
    stubs.append(ValueDecl(f"{stub.name} as stored", spec, Role.TMP))
    return len(stubs) - 1


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(order.index(axis) for axis in range(len(order)))
