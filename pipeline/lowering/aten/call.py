"""The kinds Aten and HigherOrder: an operator of torch by its name, with its arguments by theirs.

The arguments are text, since only text holds None, nested lists, names of dtypes, infinities and complex numbers: JSON
as `pipeline.ir.json_attr` writes an attribute.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial

from pipeline.ir.builder import Emitter
from pipeline.ir.graph import Attr, KernelSpec
from pipeline.ir.json_attr import write_attr
from pipeline.lowering.aten.order import ORDERS
from pipeline.lowering.aten.shape import as_view
from pipeline.lowering.emitter import Specs, emitter
from pipeline.lowering.kinds import Kind
from pipeline.lowering.layout import ViewRule

__all__ = ["EMITTERS", "INPLACE", "VIEWS", "emitter_of", "is_call"]

HIGHER_ORDER = "higher_order."


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
    call = {name: write_attr(item) for name, item in attrs.items() if name != ORDERS}
    found: dict[str, Attr] = {"op": kind, "call": json.dumps(call, separators=(",", ":"))}
    if kind.startswith(HIGHER_ORDER):
        return EMITTERS["HigherOrder"](found, ins, outs)
    return EMITTERS["Aten"]({**found, "orders": json.dumps(attrs.get(ORDERS, ()))}, ins, outs)


EMITTERS: dict[str, Emitter] = {
    "Aten": emitter(Kind.Aten, "op=s,call=s,orders=s", inputs=(0, None), outputs=(0, None)),
    "HigherOrder": emitter(Kind.HigherOrder, "op=s,call=s", inputs=(0, None), outputs=(0, None)),
}

INPLACE: dict[str, tuple[int, ...]] = {}

VIEWS: dict[str, ViewRule] = {}
