"""Operators of torch that compute the same in whatever order the axes of their operands and results lie in memory.

Others do not say so, and some compute other numbers: torch's kernel of `native_group_norm_backward` reads its operands
as if they had one memory format, since autograd brings the gradient into the format of the input before the call;
that of `avg_pool3d` writes rows into an `out=` with its channels last. So an operator that is not in this table finds
each operand with the strides of the trace, as in eager torch, and chooses the strides of its results.
"""

from __future__ import annotations

from typing import Final

from pipeline.ops.aten.inplace import POINTWISE
from pipeline.ops.aten.orders import AS_STRIDED


def takes_any_order(kind: str) -> bool:
    """Whether the operator `kind` reads operands, and writes into given results, of any strides."""
    return kind in ANY_ORDER


GRADIENTS_OF_ELEMENTS = """
elu_backward gelu_backward hardsigmoid_backward hardswish_backward hardtanh_backward leaky_relu_backward mish_backward
sigmoid_backward silu_backward softplus_backward tanh_backward threshold_backward
"""

MOVES = """
alias.default cat.default clone.default contiguous.default copy.default detach.default embedding.default
gather.default index.Tensor index_add.default index_copy.default index_fill.int_Scalar index_put.default
index_select.default masked_fill.Tensor repeat.default repeat_interleave.self_int scatter.src scatter.value
scatter_add.default scatter_reduce.two select_backward.default select_scatter.default slice_backward.default
slice_scatter.default sort.stable stack.default _to_copy.default
"""

PRODUCTS = """
addmm.default baddbmm.default bmm.default einsum.default linear.default matmul.default mm.default mv.default
scaled_dot_product_attention.default convolution.default convolution_backward.default conv1d.default conv2d.default
conv3d.default
"""

REDUCTIONS = """
all.dim amax.default amin.default any.dim argmax.default argmin.default cumsum.default linalg_vector_norm.default
log_softmax.int logsumexp.default max.dim mean.dim mean.default softmax.int sum.default sum.dim_IntList var.correction
"""

IMAGES = """
adaptive_avg_pool2d.default _adaptive_avg_pool2d.default _adaptive_avg_pool2d_backward.default avg_pool2d.default
avg_pool2d_backward.default batch_norm.default constant_pad_nd.default group_norm.default layer_norm.default
max_pool2d.default max_pool2d_with_indices.default max_pool2d_with_indices_backward.default
native_batch_norm_backward.default pad.default upsample_bilinear2d.vec upsample_nearest2d.vec
upsample_nearest2d_backward.default
"""

ANY_ORDER: Final = frozenset(
    [
        *POINTWISE,
        AS_STRIDED,  # it counts through rows, and `order.py` has seen to what it reads
        *(f"aten.{name}.default" for name in GRADIENTS_OF_ELEMENTS.split()),
        *(f"aten.{name}" for name in (MOVES + PRODUCTS + REDUCTIONS + IMAGES).split()),
    ]
)
