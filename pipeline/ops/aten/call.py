"""The kinds Aten and HigherOrder: an operator of torch and its arguments, all by name.

The schema lists the arguments that were given, and each argument says its type (`pipeline.ops.tagged`), so that a
runtime without Python reads a call: `aten/2:op=s,call={self,dim,keepdim},orders=v`.

Aten is for the operators that have no kind of their own (`typed.py`), and for calls of others that no signature covers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from pipeline.ir.builder import Emitter
from pipeline.ir.graph import Attr, KernelSpec
from pipeline.ops.aten.orders import ORDERS
from pipeline.ops.aten.typed import as_typed
from pipeline.ops.aten.views import as_view
from pipeline.ops.kinds import Kind
from pipeline.ops.rows import RUNS_BODIES, KernelKind, Specs, everywhere, kind, signature

HIGHER_ORDER = "higher_order."

ANY = signature(inputs=(0, None), outputs=(0, None))
ATEN = kind(Kind.Aten, ANY, "op=s,call={},orders=v", version=2)
BODIES = kind(Kind.HigherOrder, ANY, "op=s,call={}", version=2, obstacles=everywhere(RUNS_BODIES))


def is_call(kind: str) -> bool:
    """Whether `kind` names an operator of torch: `namespace.name.overload`, or `higher_order.name`."""
    return kind.count(".") == 2 or kind.startswith(HIGHER_ORDER)


def emitter_of(kind: str) -> Emitter:
    """The emitter of the operator `kind`."""
    return partial(_emit, kind)


def _emit(kind: str, attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> KernelSpec:
    view = as_view(kind, attrs, ins, outs)
    if view is not None:
        return view
    typed = as_typed(kind, attrs, ins, outs)
    if typed is not None:
        return typed
    call = {name: item for name, item in attrs.items() if name != ORDERS}
    if kind.startswith(HIGHER_ORDER):
        return _with_names(BODIES, call).emit({"op": kind, "call": call}, ins, outs)
    return _with_names(ATEN, call).emit({"op": kind, "call": call, "orders": attrs.get(ORDERS, ())}, ins, outs)


def _with_names(row: KernelKind, call: Mapping[str, Attr]) -> KernelKind:
    """`row` with the names of the arguments in its schema."""
    return replace(row, schema=row.schema.replace("{}", f"{{{','.join(call)}}}"))
