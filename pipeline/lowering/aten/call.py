"""The kinds Aten and HigherOrder: an operator of torch and its arguments, all by name.

The schema lists the arguments that were given, and each argument says its type (`pipeline.lowering.tagged`), so that a
runtime without Python reads a call: `aten/2:op=s,call={self,dim,keepdim},orders=v`.

Some results may be written over an operand that dies. Elementwise operators read an element before they overwrite it,
and the planner asks for one shape and dtype, so a broadcast operand is never overwritten. Operators such as
`index_copy` return their first operand with some elements changed: in place, only these are copied (a KV cache).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from pipeline.ir.builder import Emitter
from pipeline.ir.graph import Attr, InputRef, KernelSpec, Op, parts
from pipeline.lowering.aten.order import ORDERS, has_permuted_results
from pipeline.lowering.aten.views import as_view
from pipeline.lowering.emitter_factory import KernelKind, Specs, kind, signature
from pipeline.lowering.kinds import Kind

__all__ = ["HIGHER_ORDER", "KINDS", "emitter_of", "inplace_of", "is_call"]

HIGHER_ORDER = "higher_order."

ANY = signature(inputs=(0, None), outputs=(0, None))
ATEN = kind(Kind.Aten, ANY, "op=s,call={},orders=v", version=2)
BODIES = kind(Kind.HigherOrder, ANY, "op=s,call={}", version=2)
KINDS = (ATEN, BODIES)


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
    call = {name: item for name, item in attrs.items() if name != ORDERS}
    if kind.startswith(HIGHER_ORDER):
        return _with_names(BODIES, call).emit({"op": kind, "call": call}, ins, outs)
    return _with_names(ATEN, call).emit({"op": kind, "call": call, "orders": attrs.get(ORDERS, ())}, ins, outs)


def _with_names(row: KernelKind, call: Mapping[str, Attr]) -> KernelKind:
    """`row` with the names of the arguments in its schema."""
    return replace(row, schema=row.schema.replace("{}", f"{{{','.join(call)}}}"))


def inplace_of(op: Op) -> tuple[int, ...]:
    """The inputs whose storage the first result of a torch operator may take."""
    if has_permuted_results(op):  # a square operand has the result's sizes, but other strides
        return ()
    if op.kind in POINTWISE:
        return tuple(range(len(op.inputs)))
    reads = [part.index for item in op.attrs.values() for part in parts(item) if isinstance(part, InputRef)]
    return (0,) if op.kind in CHANGED and op.attrs.get("self") == InputRef(0) and reads.count(0) == 1 else ()


OF_ONE_OR_TWO_TENSORS = """
add sub mul div eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor fmod remainder
"""

OF_TENSORS = """
abs acos asin atan bitwise_not ceil clamp clamp_max clamp_min cos cosh elu erf erfc exp exp2 expm1 floor gelu
hardsigmoid hardswish hardtanh leaky_relu log log10 log1p log2 logical_not mish neg reciprocal relu relu6 round rsqrt
sigmoid sign silu sin sinh softplus sqrt square tan tanh trunc
addcdiv addcmul atan2 logical_and logical_or logical_xor maximum minimum
"""

POINTWISE: Final = frozenset(
    [
        *(f"aten.{name}.{overload}" for name in OF_ONE_OR_TWO_TENSORS.split() for overload in ("Tensor", "Scalar")),
        *(f"aten.{name}.default" for name in OF_TENSORS.split()),
        "aten.clamp.Tensor",
        "aten.div.Tensor_mode",
        "aten.masked_fill.Scalar",
        "aten.pow.Tensor_Scalar",
        "aten.pow.Tensor_Tensor",
        "aten.where.self",
    ]
)
"""Operators whose result element i depends only on elements i of the operands."""

CHANGED: Final = frozenset(
    {
        "aten.copy.default",
        "aten.fill.Scalar",
        "aten.fill.Tensor",
        "aten.index_add.default",
        "aten.index_copy.default",
        "aten.index_fill.int_Scalar",
        "aten.index_fill.int_Tensor",
        "aten.index_put.default",
        "aten.masked_fill.Tensor",
        "aten.masked_scatter.default",
        "aten.scatter.src",
        "aten.scatter.value",
        "aten.scatter_add.default",
        "aten.select_scatter.default",
        "aten.slice_scatter.default",
        "aten.zero.default",
    }
)
"""Operators whose result is their first operand with some elements changed."""
