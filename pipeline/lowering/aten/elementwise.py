"""Operators of torch of which element i of the result depends on elements i of the operands only.

Their results may be written over an operand that dies. Torch's kernels for them read what they overwrite first, and
the planner asks for one shape and dtype, so a broadcast operand drops out by itself.
"""

from __future__ import annotations

from typing import Final

__all__ = ["POINTWISE"]

WITH_TENSORS = "add sub mul div eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor fmod remainder".split()

WITH_BOTH = "pow clamp".split()

ALONE = (
    "abs acos asin atan bitwise_not ceil cos cosh erf erfc exp exp2 expm1 floor gelu hardsigmoid hardswish hardtanh "
    "leaky_relu elu log log10 log1p log2 logical_not mish neg reciprocal relu relu6 round rsqrt sigmoid sign silu sin "
    "sinh softplus sqrt square tan tanh trunc maximum minimum logical_and logical_or logical_xor atan2 addcmul addcdiv "
    "clamp clamp_min clamp_max"
).split()

POINTWISE: Final = frozenset(
    [
        *(f"aten.{name}.{overload}" for name in WITH_TENSORS for overload in ("Tensor", "Scalar")),
        *(f"aten.{name}.Tensor" for name in WITH_BOTH),
        *(f"aten.{name}.default" for name in ALONE),
        "aten.pow.Tensor_Scalar",
        "aten.pow.Tensor_Tensor",
        "aten.where.self",
        "aten.masked_fill.Scalar",
        "aten.div.Tensor_mode",
    ]
)
