"""Ops of torch graphs (`aten.linear.default`, `mylib.op.default`, `higher_order.cond`) as kernel calls.

What only moves elements is one of our own view kinds, which cost nothing at run time (`shape.py`). Everything else is
the kind Aten, which holds the whole call, so every operator that torch has can be lowered (`call.py`). Results lie in
memory as they lay in the trace (`order.py`).
"""

from __future__ import annotations

from pipeline.lowering.aten.call import EMITTERS, INPLACE, VIEWS, emitter_of, is_call
from pipeline.lowering.aten.elementwise import POINTWISE
from pipeline.lowering.aten.index import changed_in_place
from pipeline.lowering.aten.order import AS_STRIDED, in_traced_order, memory_order, turned
from pipeline.lowering.aten.shape import as_view

__all__ = [
    "AS_STRIDED",
    "EMITTERS",
    "INPLACE",
    "POINTWISE",
    "VIEWS",
    "as_view",
    "changed_in_place",
    "emitter_of",
    "in_traced_order",
    "is_call",
    "memory_order",
    "turned",
]
