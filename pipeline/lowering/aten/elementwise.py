"""Operators of torch of which element i of the result depends on elements i of the operands only.

Their results may be written over an operand that dies. Torch's kernels for them read what they overwrite first, and
the planner asks for one shape and dtype, so a broadcast operand drops out by itself.
"""

from __future__ import annotations

from typing import Final

__all__ = ["POINTWISE"]

COMPARE_OR_COMBINE = """
add sub mul div eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor fmod remainder
"""

OF_ONE_TENSOR = """
abs acos asin atan bitwise_not ceil clamp clamp_max clamp_min cos cosh elu erf erfc exp exp2 expm1 floor gelu
hardsigmoid hardswish hardtanh leaky_relu log log10 log1p log2 logical_not mish neg reciprocal relu relu6 round rsqrt
sigmoid sign silu sin sinh softplus sqrt square tan tanh trunc
"""

OF_SEVERAL_TENSORS = """
addcdiv addcmul atan2 logical_and logical_or logical_xor maximum minimum
"""

POINTWISE: Final = frozenset(
    [
        *(f"aten.{name}.{overload}" for name in COMPARE_OR_COMBINE.split() for overload in ("Tensor", "Scalar")),
        *(f"aten.{name}.default" for name in (OF_ONE_TENSOR + OF_SEVERAL_TENSORS).split()),
        "aten.clamp.Tensor",
        "aten.div.Tensor_mode",
        "aten.masked_fill.Scalar",
        "aten.pow.Tensor_Scalar",
        "aten.pow.Tensor_Tensor",
        "aten.where.self",
    ]
)
