"""Which operands of an operator of torch its result may be written over, once they die.

Elementwise operators read an element before they overwrite it, and the planner asks for one shape and dtype, so a
broadcast operand is never overwritten. Operators such as `index_copy` return their first operand with some elements
changed: in place, only these are copied (a KV cache).
"""

from __future__ import annotations

from typing import Final

from pipeline.ir.graph import InputRef, Op, parts
from pipeline.ops.aten.orders import has_permuted_results


def inplace_of(op: Op) -> tuple[int, ...]:
    """The inputs whose storage the first result of a torch operator may take."""
    if has_permuted_results(op):  # a square operand has the result's sizes, but other strides
        return ()
    if op.kind in POINTWISE:
        return tuple(range(len(op.inputs)))
    if op.kind in WRITTEN_LAST:
        return (0,) if op.inputs.count(op.inputs[0]) == 1 else ()
    reads = [part.index for item in op.attrs.values() for part in parts(item) if isinstance(part, InputRef)]
    return (0,) if op.kind in CHANGED and op.attrs.get("self") == InputRef(0) and reads.count(0) == 1 else ()


OF_ONE_OR_TWO_TENSORS = """
add sub mul div eq ne lt le gt ge __and__ __or__ bitwise_and bitwise_or bitwise_xor fmod remainder
"""

OF_TENSORS = """
abs acos acosh asin asinh atan atanh bitwise_not ceil clamp clamp_max clamp_min cos cosh elu erf erfc exp exp2 expm1
floor gelu hardsigmoid hardswish hardtanh leaky_relu log log10 log1p log2 logical_not mish neg reciprocal relu relu6
round rsqrt sigmoid sign silu sin sinh softplus sqrt square tan tanh trunc addcdiv addcmul atan2 logical_and
logical_or logical_xor maximum minimum
"""

POINTWISE: Final = frozenset(
    [
        *(f"aten.{name}.{overload}" for name in OF_ONE_OR_TWO_TENSORS.split() for overload in ("Tensor", "Scalar")),
        *(f"aten.{name}.default" for name in OF_TENSORS.split()),
        "aten.clamp.Tensor",
        "aten.div.Tensor_mode",
        "aten.masked_fill.Scalar",
        "aten.multiply.Tensor",
        "aten.pow.Tensor_Scalar",
        "aten.pow.Tensor_Tensor",
        "aten.rsub.Scalar",
        "aten.where.Scalar",
        "aten.where.ScalarOther",
        "aten.where.ScalarSelf",
        "aten.where.self",
        "onnxline.unsigned.default",
    ]
)
"""Operators whose result element i depends only on elements i of the operands."""

WRITTEN_LAST: Final = frozenset(f"aten.{name}.default" for name in ("layer_norm", "group_norm", "rms_norm"))
"""Operators whose kernels compute in memory of their own, and copy the result when it is done."""

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
        "aten.scatter_reduce.two",
        "aten.select_scatter.default",
        "aten.slice_scatter.default",
        "aten.zero.default",
    }
)
"""Operators whose result is their first operand with some elements changed."""
