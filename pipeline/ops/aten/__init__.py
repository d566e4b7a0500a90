"""Ops of torch graphs (`aten.linear.default`, `mylib.op.default`, `higher_order.cond`) as kernel calls.

An operator that only moves elements becomes one of our own view kinds, which cost nothing at run time (`views.py`).
The operators that nearly all calls of models are have kinds of their own, with typed fields (`typed.py`). Every other
one becomes the kind Aten, which holds the whole call, so all of torch can be lowered.
Operands keep the order in memory that they had in the trace, unless the order does not matter (`memory.py`).
"""

from __future__ import annotations

from pipeline.ops import shape
from pipeline.ops.aten import typed
from pipeline.ops.aten.memory import AS_STRIDED, inplace_of, takes_any_order
from pipeline.ops.aten.typed import (
    ATEN,
    BODIES,
    DRAWING,
    HIGHER_ORDER,
    READS_HOST,
    TYPED,
    WAITS_ON_CUDA,
    call_attrs,
    emitter_of,
    is_call,
    untyped_call,
)
from pipeline.ops.aten.views import as_view

KINDS = (ATEN, BODIES, *typed.KINDS)

CALL_KINDS = frozenset(row.kind for row in (*KINDS, *shape.KINDS))
"""Kinds of kernels that operators of torch become. No op has the name of one: its kind is the operator."""
