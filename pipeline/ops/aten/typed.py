"""Operators of torch with a kind of kernel of their own: the ones that nearly all calls of models are.

A row is a kind and the signature of its operators (`signatures.py`). The fields of a call follow from the signature,
and so do its operands; what its result may be written over is a fact of the operator (`inplace.py`). A call that its
signature does not cover, such as a product with a complex number, is of the kind Aten.

`order` is the permutation from the stored form of the result, or empty (`order.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from pipeline.ir.graph import Attr, KernelSpec
from pipeline.ops import elementwise
from pipeline.ops.aten.inplace import CHANGED, POINTWISE
from pipeline.ops.aten.orders import ORDERS
from pipeline.ops.aten.signatures import OperatorSignature
from pipeline.ops.kinds import Kind
from pipeline.ops.rows import Check, KernelKind, OpCall, Specs, kind, signature

SIGNATURES: Final[Mapping[Kind, str]] = {
    # products of matrices
    Kind.AtenLinear: "linear.default(T input, T weight, T? bias)",
    Kind.AtenMatMul: "matmul.default(T self, T other)",
    Kind.AtenMm: "mm.default(T self, T mat2)",
    Kind.AtenBmm: "bmm.default(T self, T mat2)",
    Kind.AtenAddmm: "addmm.default(T self, T mat1, T mat2, n beta=1, n alpha=1)",
    Kind.AtenBaddbmm: "baddbmm.default(T self, T batch1, T batch2, n beta=1, n alpha=1)",
    Kind.AtenEinsum: "einsum.default(s equation, T[] tensors)",
    Kind.AtenScaledDotProductAttention: "scaled_dot_product_attention.default(T query, T key, T value, T? attn_mask, "
    "= dropout_p=0.0, ? is_causal=False, f? scale=None, ? enable_gqa=False)",
    # convolutions, pools, grids
    Kind.AtenConv1d: "conv1d.default(T input, T weight, T? bias, "
    "i[] stride=(1,), i[] padding=(0,), i[] dilation=(1,), i groups=1)",
    Kind.AtenConv2d: "conv2d.default(T input, T weight, T? bias, "
    "i[] stride=(1,), i[] padding=(0,), i[] dilation=(1,), i groups=1)",
    Kind.AtenConv2dPadding: "conv2d.padding(T input, T weight, T? bias, "
    "i[] stride=(1,), s padding='valid', i[] dilation=(1,), i groups=1)",
    Kind.AtenConvTranspose2d: "conv_transpose2d.input(T input, T weight, T? bias, "
    "i[] stride=(1,), i[] padding=(0,), i[] output_padding=(0,), i groups=1, i[] dilation=(1,))",
    Kind.AtenMaxPool2d: "max_pool2d.default(T self, i[] kernel_size, "
    "i[] stride=(), i[] padding=(0,), i[] dilation=(1,), ? ceil_mode=False)",
    Kind.AtenAvgPool2d: "avg_pool2d.default(T self, i[] kernel_size, "
    "i[] stride=(), i[] padding=(0,), ? ceil_mode=False, ? count_include_pad=True, i? divisor_override=None)",
    Kind.AtenAdaptiveAvgPool1d: "adaptive_avg_pool1d.default(T self, i[] output_size)",
    Kind.AtenAdaptiveAvgPool2d: "adaptive_avg_pool2d.default(T self, i[] output_size)",
    Kind.AtenUpsampleBilinear2d: "upsample_bilinear2d.vec(T input, i[]? output_size, ? align_corners, "
    "f[]? scale_factors)",
    Kind.AtenUpsampleLinear1d: "upsample_linear1d.vec(T input, i[]? output_size, ? align_corners, f[]? scale_factors)",
    Kind.AtenGridSampler: "grid_sampler.default(T input, T grid, "
    "i interpolation_mode, i padding_mode, ? align_corners)",
    Kind.AtenIm2col: "im2col.default(T self, i[] kernel_size, i[] dilation, i[] padding, i[] stride)",
    # normalisations
    Kind.AtenLayerNorm: "layer_norm.default(T input, i[] normalized_shape, T? weight, T? bias, f eps=1e-05, "
    "- cudnn_enable=None)",
    Kind.AtenGroupNorm: "group_norm.default(T input, i num_groups, T? weight, T? bias, f eps=1e-05, "
    "- cudnn_enabled=None)",
    Kind.AtenBatchNorm: "batch_norm.default(T input, T weight, T bias, T running_mean, T running_var, "
    "= training=False, f momentum, f eps, - cudnn_enabled=False)",
    Kind.AtenRmsNorm: "rms_norm.default(T input, i[] normalized_shape, T? weight, f? eps=None)",
    Kind.AtenSoftmax: "softmax.int(T self, i dim, dtype? dtype)",
    Kind.AtenLogSoftmax: "log_softmax.int(T self, i dim, dtype? dtype)",
    # elementwise, of two
    Kind.AtenAdd: "add.Tensor(T self, T|n other, n alpha=1)",
    Kind.AtenSub: "sub.Tensor(T self, T|n other, n alpha=1)",
    Kind.AtenMul: "mul.Tensor(T self, T|n other)",
    Kind.AtenDiv: "div.Tensor(T self, T|n other)",
    Kind.AtenPow: "pow.Tensor_Tensor|Tensor_Scalar(T self, T|n exponent)",
    Kind.AtenMaximum: "maximum.default(T self, T other)",
    Kind.AtenMinimum: "minimum.default(T self, T other)",
    Kind.AtenRsub: "rsub.Scalar(T self, n other, n alpha=1)",
    Kind.AtenRemainder: "remainder.Tensor|Scalar(T self, T|n other)",
    Kind.AtenAnd: "bitwise_and.Tensor|Scalar(T self, T|n other)",
    Kind.AtenOr: "bitwise_or.Tensor|Scalar(T self, T|n other)",
    Kind.AtenLogicalAnd: "logical_and.default(T self, T other)",
    Kind.AtenEq: "eq.Tensor|Scalar(T self, T|n other)",
    Kind.AtenNe: "ne.Tensor|Scalar(T self, T|n other)",
    Kind.AtenLt: "lt.Tensor|Scalar(T self, T|n other)",
    Kind.AtenLe: "le.Tensor|Scalar(T self, T|n other)",
    Kind.AtenGt: "gt.Tensor|Scalar(T self, T|n other)",
    Kind.AtenGe: "ge.Tensor|Scalar(T self, T|n other)",
    Kind.AtenWhere: "where.self|ScalarSelf|ScalarOther|Scalar(T condition, T|n self, T|n other)",
    Kind.AtenMaskedFill: "masked_fill.Scalar(T self, T mask, n value)",
    # elementwise, of one
    Kind.AtenNeg: "neg.default(T self)",
    Kind.AtenAbs: "abs.default(T self)",
    Kind.AtenSqrt: "sqrt.default(T self)",
    Kind.AtenRsqrt: "rsqrt.default(T self)",
    Kind.AtenReciprocal: "reciprocal.default(T self)",
    Kind.AtenSquare: "square.default(T self)",
    Kind.AtenExp: "exp.default(T self)",
    Kind.AtenLog: "log.default(T self)",
    Kind.AtenSin: "sin.default(T self)",
    Kind.AtenCos: "cos.default(T self)",
    Kind.AtenErf: "erf.default(T self)",
    Kind.AtenTanh: "tanh.default(T self)",
    Kind.AtenSigmoid: "sigmoid.default(T self)",
    Kind.AtenRelu: "relu.default(T self)",
    Kind.AtenSilu: "silu.default(T self)",
    Kind.AtenHardswish: "hardswish.default(T self)",
    Kind.AtenFloor: "floor.default(T self)",
    Kind.AtenLogicalNot: "logical_not.default(T self)",
    Kind.AtenBitwiseNot: "bitwise_not.default(T self)",
    Kind.AtenGelu: "gelu.default(T self, s approximate='none')",
    Kind.AtenSoftplus: "softplus.default(T self, n beta=1, n threshold=20)",
    Kind.AtenLeakyRelu: "leaky_relu.default(T self, n negative_slope=0.01)",
    Kind.AtenHardtanh: "hardtanh.default(T self, n min_val=-1, n max_val=1)",
    Kind.AtenClamp: "clamp.default(T self, n? min=None, n? max=None)",
    Kind.AtenClampMin: "clamp_min.default(T self, n min)",
    Kind.AtenTypeAs: "type_as.default(T self, T other)",
    Kind.AtenGlu: "glu.default(T self, i dim=-1)",
    # along axes
    Kind.AtenSum: "sum.dim_IntList(T self, i[]? dim, ? keepdim=False, dtype? dtype)",
    Kind.AtenMean: "mean.dim(T self, i[]? dim, ? keepdim=False, dtype? dtype)",
    Kind.AtenAmax: "amax.default(T self, i[] dim=(), ? keepdim=False)",
    Kind.AtenMaxDim: "max.dim(T self, i dim, ? keepdim=False)",
    Kind.AtenArgmax: "argmax.default(T self, i? dim=None, ? keepdim=False)",
    Kind.AtenCumsum: "cumsum.default(T self, i dim, dtype? dtype)",
    Kind.AtenVectorNorm: "linalg_vector_norm.default(T self, n ord=2, i[]? dim=None, ? keepdim=False, dtype? dtype)",
    Kind.AtenTopk: "topk.default(T self, i k, i dim=-1, ? largest=True, ? sorted=True)",
    # moves of elements
    Kind.AtenCat: "cat.default(T[] tensors, i dim=0)",
    Kind.AtenStack: "stack.default(T[] tensors, i dim=0)",
    Kind.AtenPad: "pad.default(T self, i[] pad, s mode='constant', f? value=None)",
    Kind.AtenRepeat: "repeat.default(T self, i[] repeats)",
    Kind.AtenRepeatInterleave: "repeat_interleave.self_int(T self, i repeats, i? dim=None, - output_size=None)",
    Kind.AtenRoll: "roll.default(T self, i[] shifts, i[] dims=())",
    # by positions
    Kind.AtenEmbedding: "embedding.default(T weight, T indices, "
    "- padding_idx=None, - scale_grad_by_freq=None, - sparse=None)",
    Kind.AtenIndex: "index.Tensor(T self, T?[] indices)",
    Kind.AtenIndexSelect: "index_select.default(T self, i dim, T index)",
    Kind.AtenGather: "gather.default(T self, i dim, T index, - sparse_grad=None)",
    Kind.AtenIndexCopy: "index_copy.default(T self, i dim, T index, T source)",
    Kind.AtenScatter: "scatter.src(T self, i dim, T index, T src)",
    Kind.AtenScatterValue: "scatter.value(T self, i dim, T index, n value)",
    Kind.AtenCopy: "copy.default(T self, T src, - non_blocking=None)",
    Kind.AtenSliceScatter: "slice_scatter.default(T self, T src, i dim=0, i? start=None, i? end=None, i step=1)",
    Kind.AtenSelectScatter: "select_scatter.default(T self, T src, i dim, i index)",
    # new tensors in the form of another
    Kind.AtenZerosLike: "zeros_like.default(T self, dtype? dtype, "
    "- layout=None, - device=None, - pin_memory=None, - memory_format=None)",
    Kind.AtenOnesLike: "ones_like.default(T self, dtype? dtype, "
    "- layout=None, - device=None, - pin_memory=None, - memory_format=None)",
}

TWO_RESULTS = (Kind.AtenMaxDim, Kind.AtenTopk)

SAME_OPERATOR: Final[Mapping[str, str]] = {
    "aten.multiply.Tensor": "aten.mul.Tensor",
    "aten.concat.default": "aten.cat.default",
    **{
        f"aten.__{name}__.{overload}": f"aten.bitwise_{name}.{overload}"
        for name in ("and", "or")
        for overload in ("Tensor", "Scalar")
    },
}
"""Operators that torch has under a second name."""


CONVERSIONS: Final = frozenset(
    {"aten.to.dtype", "aten.to.device", "aten.to.dtype_layout", "aten.to.other", "aten._to_copy.default"}
)

CAST: Final = next(row for row in elementwise.KINDS if row.kind is Kind.Cast)


@dataclass(frozen=True, slots=True)
class TypedCall:
    """A kind of kernel for calls of one signature."""

    row: KernelKind
    signature: OperatorSignature

    @classmethod
    def of(cls, number: Kind, text: str) -> TypedCall:
        calls = OperatorSignature.parse(text)
        results = 2 if number in TWO_RESULTS else 1
        layout = ",".join(filter(None, (calls.layout(), "order=i[]" if results == 1 else "")))
        values = signature(_has_its_operands(calls), inputs=(0, None), outputs=results)
        return cls(kind(number, values, layout, inplace=_inplace(calls)), calls)


def _inplace(calls: OperatorSignature) -> tuple[int, ...]:
    """The operands that `inplace_of` allows; a call with fewer operands has fewer."""
    if calls.operators[0] in POINTWISE:
        return tuple(range(sum(argument.code in ("T", "T?", "T|n") for argument in calls.arguments)))
    return (0,) if calls.operators[0] in CHANGED else ()


def _has_its_operands(calls: OperatorSignature) -> Check:
    def check(call: OpCall) -> str | None:
        wanted = calls.count_operands(call.attrs)
        return None if len(call.ins) == wanted else f"{len(call.ins)} operands; expected {wanted} by its fields"

    return check


TYPED: Final[Mapping[Kind, TypedCall]] = MappingProxyType(
    {number: TypedCall.of(number, text) for number, text in SIGNATURES.items()}
)

BY_OPERATOR: Final[Mapping[str, TypedCall]] = MappingProxyType(
    {operator: typed for typed in TYPED.values() for operator in typed.signature.operators}
)

KINDS = tuple(typed.row for typed in TYPED.values())


def as_typed(operator: str, attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> KernelSpec | None:
    """The kernel of a call that a kind of its own covers; None for every other call."""
    if operator in CONVERSIONS:
        return _as_cast(attrs, ins, outs)
    operator = SAME_OPERATOR.get(operator, operator)
    typed = BY_OPERATOR.get(operator)
    if typed is None or _is_decided_by_data(operator, ins):
        return None
    orders = attrs.get(ORDERS, ())
    fields = typed.signature.pack(operator, {name: item for name, item in attrs.items() if name != ORDERS})
    if fields is None or not isinstance(orders, tuple):
        return None
    if typed.row.kind not in TWO_RESULTS:
        fields["order"] = orders[0] if orders else ()  # type: ignore[assignment]
    elif any(orders):
        return None
    return typed.row.emit(fields, ins, outs)


def _as_cast(attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> KernelSpec | None:
    """A conversion to another dtype; our own kind saturates in float8, which torch does not."""
    orders, to = attrs.get(ORDERS, ()), outs[0].dtype
    is_plain = len(ins) == 1 and ins[0].shape == outs[0].shape and isinstance(orders, tuple) and not any(orders)
    return CAST.emit({"to": to}, ins, outs) if is_plain and not to.startswith("float8") else None


def _is_decided_by_data(operator: str, ins: Specs) -> bool:
    """Whether a mask among the indices decides the shape of the result."""
    return operator == "aten.index.Tensor" and any(spec.dtype in ("bool", "uint8") for spec in ins[1:])


def untyped_call(number: Kind, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What the attributes of a call of the kind Aten would be: `op`, `call` and `orders`."""
    operator, call = TYPED[number].signature.unpack(fields)
    return {"op": operator, "call": call, "orders": (fields["order"],) if "order" in fields else ()}
