"""Ops of torch graphs (`aten.linear.default`, `mylib.op.default`, `higher_order.cond`) as kernel calls.

An operator that only moves elements becomes one of our own view kinds, which cost nothing at run time (`views.py`).
The operators that nearly all calls of models are have kinds of their own, with typed fields (`typed.py`). Every other
one becomes the kind Aten, which holds the whole call, so all of torch can be lowered (`call.py`).
Results keep their traced order in memory (`order.py`), and operands too, unless it does not matter (`any_order.py`).
"""

from __future__ import annotations

from pipeline.lowering.aten import typed
from pipeline.lowering.aten.any_order import takes_any_order
from pipeline.lowering.aten.call import ATEN, BODIES, HIGHER_ORDER, emitter_of, is_call
from pipeline.lowering.aten.inplace import inplace_of
from pipeline.lowering.aten.order import AS_STRIDED, in_traced_order, memory_order
from pipeline.lowering.aten.typed import TYPED, untyped_call
from pipeline.lowering.aten.views import as_view

__all__ = [
    "AS_STRIDED",
    "HIGHER_ORDER",
    "KINDS",
    "TYPED",
    "as_view",
    "emitter_of",
    "in_traced_order",
    "inplace_of",
    "is_call",
    "memory_order",
    "takes_any_order",
    "untyped_call",
]

KINDS = (ATEN, BODIES, *typed.KINDS)
