"""Which operands of an operator of torch its result may be written over, once they die.

Elementwise operators read an element before they overwrite it, and the planner asks for one shape and dtype, so a
broadcast operand is never overwritten. Operators such as `index_copy` return their first operand with some elements
changed: in place, only these are copied (a KV cache).

The attribute by which a call says that its results are stored with their axes permuted (`lowering.traced_order`).

Operators of torch that compute the same in whatever order the axes of their operands and results lie in memory.

Others do not say so, and some compute other numbers: torch's kernel of `native_group_norm_backward` reads its operands
as if they had one memory format, since autograd brings the gradient into the format of the input before the call;
that of `avg_pool3d` writes rows into an `out=` with its channels last. So an operator that is not in this table finds
each operand with the strides of the trace, as in eager torch, and chooses the strides of its results.
"""

from __future__ import annotations

from typing import Final

from pipeline.ir.graph import InputRef, Op, parts

AS_STRIDED = "aten.as_strided.default"
"""The one operator that counts through the memory of its operand."""

ORDERS = "orders of axes"
"""An attribute of ours: for each result, the permutation from its memory layout to its logical axes, or ()."""


def has_permuted_results(op: Op) -> bool:
    """Whether a result of `op` is stored with its axes permuted."""
    orders = op.attrs.get(ORDERS, ())
    return isinstance(orders, tuple) and any(orders)


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

WRITTEN_LAST: Final = frozenset(
    f"aten.{name}.default" for name in ("layer_norm", "group_norm", "rms_norm", "_log_softmax")
)
"""Operators whose kernels compute in memory of their own, and copy the result when it is done. Those of `_log_softmax`
read a row for its maximum and its sum, and then each element just before they write it."""

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
        AS_STRIDED,  # it counts through rows, and `memory_order.py` has seen to what it reads
        *(f"aten.{name}.default" for name in GRADIENTS_OF_ELEMENTS.split()),
        *(f"aten.{name}" for name in (MOVES + PRODUCTS + REDUCTIONS + IMAGES).split()),
    ]
)
