"""Graph → Graph: results keep the memory order that they had in the trace, such as attention's (token, head) order.

A plan stores values contiguously. So a result whose traced strides are those of a transposed tensor becomes two ops:
the operator itself, whose result has its axes in the order of memory, and a permutation of that result, which costs
nothing. Then the operator writes its result as in eager torch, its consumers find the strides of eager torch, and a
reshape that is a view in eager torch is a view here.

Inputs and stored values keep their traced strides anyway (`pipeline.ops.layout`). An `as_strided` of such a value
counts through its memory, so it reads the value with its axes in the order of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.ir.builder import ValueDecl, declarations, rebuild
from pipeline.ir.graph import Attr, Graph, InputRef, Op, Role, TensorSpec, Value
from pipeline.ops.aten.memory import AS_STRIDED, ORDERS
from pipeline.ops.aten.views import as_view

PERMUTE = "aten.permute.default"


class StoredForms:
    """The declared values of a graph, and permuted forms of some of them, with their axes in the order of memory."""

    def __init__(self, graph: Graph) -> None:
        self.decls = declarations(graph)
        self._taken = {decl.name for decl in self.decls}

    def declare(self, vid: int, order: Sequence[int]) -> int:
        """Declare a permuted form of `vid`, under a name that no other value has; returns its vid."""
        decl = self.decls[vid]
        spec = TensorSpec(tuple(decl.spec.shape[axis] for axis in order), decl.spec.dtype, decl.spec.device)
        name = f"{decl.name} as stored"
        while name in self._taken:
            name += "'"
        self._taken.add(name)
        self.decls.append(ValueDecl(name, spec, Role.TMP))
        return len(self.decls) - 1


def in_traced_order(graph: Graph) -> Graph:
    """`graph` with the same values under the same vids, and values in memory order after them; bodies likewise."""
    forms = StoredForms(graph)
    ops: list[Op] = []
    for op in graph.ops:
        op = _read_in_memory_order(graph, replace(op, bodies=tuple(map(in_traced_order, op.bodies))), forms, ops)
        outs = [graph.values[vid] for vid in op.outputs]
        orders = [memory_order(out) for out in outs] if _is_computed(forms.decls, op, outs) else []
        if not any(orders):
            ops.append(replace(op, oid=len(ops)))
            continue
        stored = [forms.declare(vid, order) if order else vid for vid, order in zip(op.outputs, orders, strict=True)]
        back = tuple(() if order is None else _inverse(order) for order in orders)
        attrs: dict[str, Attr] = {**op.attrs, ORDERS: back}
        ops.append(replace(op, oid=len(ops), outputs=tuple(stored), attrs=attrs, kernel=None))
        for inner, vid, perm in zip(stored, op.outputs, back, strict=True):
            if inner != vid:
                ops.append(_permute(len(ops), inner, vid, perm, op))
    return rebuild(graph, forms.decls, ops)


def _read_in_memory_order(graph: Graph, op: Op, forms: StoredForms, ops: list[Op]) -> Op:
    """`op`; an `as_strided` of an input or stored value in another memory order reads a permuted form of it."""
    source = graph.values[op.inputs[0]] if op.inputs else None
    if op.kind != AS_STRIDED or source is None or source.producer is not None:
        return op
    order = memory_order(source)
    if order is None:
        return op
    rows = forms.declare(source.vid, order)
    ops.append(_permute(len(ops), source.vid, rows, order, op))
    return replace(op, inputs=(rows, *op.inputs[1:]), kernel=None)


def _permute(oid: int, source: int, result: int, dims: tuple[int, ...], of: Op) -> Op:
    call: dict[str, Attr] = {"self": InputRef(0), "dims": dims}
    return Op(oid, PERMUTE, (source,), (result,), call, name=of.name, origin=of.origin)


def _is_computed(decls: Sequence[ValueDecl], op: Op, outs: Sequence[Value]) -> bool:
    """Whether `op` computes its results; a view has no storage of its own to put in order."""
    if not op.kind.startswith("aten.") or not all(out.spec.is_static for out in outs):
        return False
    ins = [decls[vid].spec for vid in op.inputs]
    return as_view(op.kind, op.attrs, ins, [out.spec for out in outs]) is None


def memory_order(value: Value) -> tuple[int, ...] | None:
    """The axes of `value`, outermost in memory first, where they are permuted and leave no gaps.

    None for every other value, also for one with named sizes or strides.
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


def is_in_memory_order(graph: Graph, op: Op) -> bool:
    """Whether `op` gives an input or stored value with its axes in the order of memory, as `in_traced_order` does."""
    source = graph.values[op.inputs[0]] if op.kind == PERMUTE else None
    return source is not None and source.producer is None and memory_order(source) == op.attrs["dims"]


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(order.index(axis) for axis in range(len(order)))
