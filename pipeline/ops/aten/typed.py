"""Operators of torch with a kind of kernel of their own: the ones that nearly all calls of models are.

A row is a kind and the signature of its operators (`signatures.py`). The fields of a call follow from the signature,
and so do its operands; what its result may be written over is a fact of the operator (`memory.py`). A call that its
signature does not cover, such as a product with a complex number, is of the kind Aten.

`order` is the permutation from the stored form of the result, or empty (`order.py`).

The kinds Aten and HigherOrder: an operator of torch and its arguments, all by name.

The schema lists the arguments that were given, and each argument says its type (`pipeline.ir.tagged`), so that a
runtime without Python reads a call: `aten/2:op=s,call={self,dim,keepdim},orders=v`.

Aten is for the operators that have no kind of their own (`typed.py`), and for calls of others that no signature covers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from pipeline.ir.builder import Emitter
from pipeline.ir.graph import Attr, InputRef, KernelSpec
from pipeline.ops import shape
from pipeline.ops.aten.memory import CHANGED, ORDERS, POINTWISE, WRITTEN_LAST
from pipeline.ops.aten.signatures import OperatorSignature
from pipeline.ops.aten.views import as_view
from pipeline.ops.kinds import Kind
from pipeline.ops.rows import (
    HOST_SYNC,
    OWN_GENERATOR,
    RUNS_BODIES,
    Check,
    Count,
    KernelKind,
    OpCall,
    Specs,
    everywhere,
    kind,
    signature,
)

SIGNATURES: Final[Mapping[Kind, str]] = {
    # products of matrices
    Kind.Linear: "linear.default(T input, T weight, T? bias)",
    Kind.MatMul: "matmul.default(T self, T other)",
    Kind.Mm: "mm.default(T self, T mat2)",
    Kind.Bmm: "bmm.default(T self, T mat2)",
    Kind.Addmm: "addmm.default(T self, T mat1, T mat2, n beta=1, n alpha=1)",
    Kind.Baddbmm: "baddbmm.default(T self, T batch1, T batch2, n beta=1, n alpha=1)",
    Kind.Einsum: "einsum.default(s equation, T[] tensors)",
    Kind.AtenScaledDotProductAttention: "scaled_dot_product_attention.default(T query, T key, T value, T? attn_mask, "
    "= dropout_p=0.0, ? is_causal=False, f? scale=None, ? enable_gqa=False)",
    # convolutions, pools, grids
    Kind.Conv1d: "conv1d.default(T input, T weight, T? bias, "
    "i[] stride=(1,), i[] padding=(0,), i[] dilation=(1,), i groups=1)",
    Kind.Conv2d: "conv2d.default(T input, T weight, T? bias, "
    "i[] stride=(1,), i[] padding=(0,), i[] dilation=(1,), i groups=1)",
    Kind.Conv2dPadding: "conv2d.padding(T input, T weight, T? bias, "
    "i[] stride=(1,), s padding='valid', i[] dilation=(1,), i groups=1)",
    Kind.ConvTranspose2d: "conv_transpose2d.input(T input, T weight, T? bias, "
    "i[] stride=(1,), i[] padding=(0,), i[] output_padding=(0,), i groups=1, i[] dilation=(1,))",
    Kind.Conv3d: "conv3d.default(T input, T weight, T? bias, "
    "i[] stride=(1,), i[] padding=(0,), i[] dilation=(1,), i groups=1)",
    Kind.ConvTranspose1d: "conv_transpose1d.default(T input, T weight, T? bias, "
    "i[] stride=(1,), i[] padding=(0,), i[] output_padding=(0,), i groups=1, i[] dilation=(1,))",
    Kind.ConvTranspose3d: "conv_transpose3d.input(T input, T weight, T? bias, "
    "i[] stride=(1,), i[] padding=(0,), i[] output_padding=(0,), i groups=1, i[] dilation=(1,))",
    Kind.MaxPool2d: "max_pool2d.default(T self, i[] kernel_size, "
    "i[] stride=(), i[] padding=(0,), i[] dilation=(1,), ? ceil_mode=False)",
    Kind.AvgPool2d: "avg_pool2d.default(T self, i[] kernel_size, "
    "i[] stride=(), i[] padding=(0,), ? ceil_mode=False, ? count_include_pad=True, i? divisor_override=None)",
    Kind.AdaptiveAvgPool1d: "adaptive_avg_pool1d.default(T self, i[] output_size)",
    Kind.AdaptiveAvgPool2d: "adaptive_avg_pool2d.default(T self, i[] output_size)",
    Kind.UpsampleBilinear2d: "upsample_bilinear2d.vec(T input, i[]? output_size, ? align_corners, f[]? scale_factors)",
    Kind.UpsampleLinear1d: "upsample_linear1d.vec(T input, i[]? output_size, ? align_corners, f[]? scale_factors)",
    Kind.GridSampler: "grid_sampler.default(T input, T grid, i interpolation_mode, i padding_mode, ? align_corners)",
    Kind.Im2col: "im2col.default(T self, i[] kernel_size, i[] dilation, i[] padding, i[] stride)",
    # normalisations
    Kind.LayerNorm: "layer_norm.default(T input, i[] normalized_shape, T? weight, T? bias, f eps=1e-05, "
    "- cudnn_enable=None)",
    Kind.GroupNorm: "group_norm.default(T input, i num_groups, T? weight, T? bias, f eps=1e-05, - cudnn_enabled=None)",
    Kind.BatchNorm: "batch_norm.default(T input, T weight, T bias, T running_mean, T running_var, "
    "= training=False, f momentum, f eps, - cudnn_enabled=False)",
    Kind.RmsNorm: "rms_norm.default(T input, i[] normalized_shape, T? weight, f? eps=None)",
    Kind.Softmax: "softmax.int(T self, i dim, dtype? dtype)",
    Kind.LogSoftmax: "log_softmax.int(T self, i dim, dtype? dtype)",
    # elementwise, of two
    Kind.Add: "add.Tensor(T self, T|n other, n alpha=1)",
    Kind.Sub: "sub.Tensor(T self, T|n other, n alpha=1)",
    Kind.Mul: "mul.Tensor(T self, T|n other)",
    Kind.Div: "div.Tensor(T self, T|n other)",
    Kind.DivMode: "div.Tensor_mode(T self, T|n other, s rounding_mode)",
    Kind.Pow: "pow.Tensor_Tensor|Tensor_Scalar(T self, T|n exponent)",
    Kind.Maximum: "maximum.default(T self, T other)",
    Kind.Minimum: "minimum.default(T self, T other)",
    Kind.Rsub: "rsub.Scalar(T self, n other, n alpha=1)",
    Kind.Fmod: "fmod.Tensor|Scalar(T self, T|n other)",
    Kind.Remainder: "remainder.Tensor|Scalar(T self, T|n other)",
    Kind.And: "bitwise_and.Tensor|Scalar(T self, T|n other)",
    Kind.Or: "bitwise_or.Tensor|Scalar(T self, T|n other)",
    Kind.LogicalAnd: "logical_and.default(T self, T other)",
    Kind.LogicalXor: "logical_xor.default(T self, T other)",
    Kind.Eq: "eq.Tensor|Scalar(T self, T|n other)",
    Kind.Ne: "ne.Tensor|Scalar(T self, T|n other)",
    Kind.Lt: "lt.Tensor|Scalar(T self, T|n other)",
    Kind.Le: "le.Tensor|Scalar(T self, T|n other)",
    Kind.Gt: "gt.Tensor|Scalar(T self, T|n other)",
    Kind.Ge: "ge.Tensor|Scalar(T self, T|n other)",
    Kind.Where: "where.self|ScalarSelf|ScalarOther|Scalar(T condition, T|n self, T|n other)",
    Kind.MaskedFill: "masked_fill.Scalar(T self, T mask, n value)",
    # elementwise, of one
    Kind.Neg: "neg.default(T self)",
    Kind.Abs: "abs.default(T self)",
    Kind.Sqrt: "sqrt.default(T self)",
    Kind.Rsqrt: "rsqrt.default(T self)",
    Kind.Reciprocal: "reciprocal.default(T self)",
    Kind.Square: "square.default(T self)",
    Kind.Exp: "exp.default(T self)",
    Kind.Log: "log.default(T self)",
    Kind.Sin: "sin.default(T self)",
    Kind.Cos: "cos.default(T self)",
    Kind.Erf: "erf.default(T self)",
    Kind.Tanh: "tanh.default(T self)",
    Kind.Sigmoid: "sigmoid.default(T self)",
    Kind.Relu: "relu.default(T self)",
    Kind.Silu: "silu.default(T self)",
    Kind.Hardswish: "hardswish.default(T self)",
    Kind.Floor: "floor.default(T self)",
    Kind.Ceil: "ceil.default(T self)",
    Kind.Round: "round.default(T self)",
    Kind.Sign: "sign.default(T self)",
    Kind.LogicalNot: "logical_not.default(T self)",
    Kind.BitwiseNot: "bitwise_not.default(T self)",
    Kind.Gelu: "gelu.default(T self, s approximate='none')",
    Kind.Softplus: "softplus.default(T self, n beta=1, n threshold=20)",
    Kind.LeakyRelu: "leaky_relu.default(T self, n negative_slope=0.01)",
    Kind.Elu: "elu.default(T self, n alpha=1, n scale=1, n input_scale=1)",
    Kind.Hardtanh: "hardtanh.default(T self, n min_val=-1, n max_val=1)",
    Kind.Clamp: "clamp.default(T self, n? min=None, n? max=None)",
    Kind.ClampMin: "clamp_min.default(T self, n min)",
    Kind.TypeAs: "type_as.default(T self, T other)",
    Kind.Glu: "glu.default(T self, i dim=-1)",
    # what ONNX means and torch cannot say in a few calls (runtime/operators.py)
    Kind.CastFloat8: "onnxline.cast_float8.default(T self, s to, ? saturate=True)",
    Kind.Unsigned: "onnxline.unsigned.default(T self, T other, s function)",
    Kind.Quantize: "onnxline.quantize.default(T self, T scale, T? zero_point, s to, i axis=1, i block_size=0, "
    "i? low=None, i? high=None, ? saturate=True, = as_floats=False)",
    Kind.Dequantize: "onnxline.dequantize.default(T self, T scale, T? zero_point, s to, i axis=1, i block_size=0)",
    Kind.Recurrent: "onnxline.recurrent.default(T input, T w, T r, T b, T hidden, T? cell, T? lengths, T? peepholes, "
    "s kind, s direction='forward', s activations='', f[]? alphas=None, f[]? betas=None, f clip=0.0, "
    "? input_forget=False, ? reset_after=False)",
    Kind.RoiAlign: "onnxline.roi_align.default(T input, T boxes, T places, i[] output_size, s mode='avg', "
    "? half_pixel=True, i sampling_ratio=0, f spatial_scale=1.0)",
    Kind.StableTopk: "onnxline.top_k.default(T self, i k, i dim, ? largest=True)",
    Kind.RandomNormal: "onnxline.random_normal.default(i[] size, f mean, f scale, s dtype, i seed)",
    Kind.RandomUniform: "onnxline.random_uniform.default(i[] size, f low, f high, s dtype, i seed)",
    Kind.Bernoulli: "onnxline.bernoulli.default(T self, s dtype, i seed)",
    Kind.Multinomial: "onnxline.multinomial.default(T self, i count, s dtype, i seed)",
    Kind.Dropout: "onnxline.dropout.default(T self, f ratio, i seed)",
    # of matrices
    Kind.Inverse: "linalg_inv.default(T A)",
    Kind.Cdist: "cdist.default(T x1, T x2, n p=2, i? compute_mode=None)",
    Kind.Triu: "triu.default(T self, i diagonal=0)",
    Kind.Tril: "tril.default(T self, i diagonal=0)",
    # along axes
    Kind.Sum: "sum.dim_IntList(T self, i[]? dim, ? keepdim=False, dtype? dtype)",
    Kind.Mean: "mean.dim(T self, i[]? dim, ? keepdim=False, dtype? dtype)",
    Kind.Amax: "amax.default(T self, i[] dim=(), ? keepdim=False)",
    Kind.Amin: "amin.default(T self, i[] dim=(), ? keepdim=False)",
    Kind.Prod: "prod.dim_int(T self, i dim, ? keepdim=False, dtype? dtype)",
    Kind.Logsumexp: "logsumexp.default(T self, i[] dim, ? keepdim=False)",
    Kind.MaxDim: "max.dim(T self, i dim, ? keepdim=False)",
    Kind.Argmax: "argmax.default(T self, i? dim=None, ? keepdim=False)",
    Kind.Argmin: "argmin.default(T self, i? dim=None, ? keepdim=False)",
    Kind.Cumsum: "cumsum.default(T self, i dim, dtype? dtype)",
    Kind.Cumprod: "cumprod.default(T self, i dim, dtype? dtype)",
    Kind.VectorNorm: "linalg_vector_norm.default(T self, n ord=2, i[]? dim=None, ? keepdim=False, dtype? dtype)",
    Kind.Topk: "topk.default(T self, i k, i dim=-1, ? largest=True, ? sorted=True)",
    Kind.Sort: "sort.stable(T self, = stable=True, i dim=-1, ? descending=False)",
    # moves of elements
    Kind.Cat: "cat.default(T[] tensors, i dim=0)",
    Kind.Stack: "stack.default(T[] tensors, i dim=0)",
    Kind.Pad: "pad.default(T self, i[] pad, s mode='constant', f? value=None)",
    Kind.ConstantPad: "constant_pad_nd.default(T self, i[] pad, n value=0)",
    Kind.Repeat: "repeat.default(T self, i[] repeats)",
    Kind.RepeatInterleave: "repeat_interleave.self_int(T self, i repeats, i? dim=None, - output_size=None)",
    Kind.Flip: "flip.default(T self, i[] dims)",
    Kind.Roll: "roll.default(T self, i[] shifts, i[] dims=())",
    # by positions
    Kind.Embedding: "embedding.default(T weight, T indices, "
    "- padding_idx=None, - scale_grad_by_freq=None, - sparse=None)",
    Kind.Index: "index.Tensor(T self, T?[] indices)",
    Kind.IndexSelect: "index_select.default(T self, i dim, T index)",
    Kind.Gather: "gather.default(T self, i dim, T index, - sparse_grad=None)",
    Kind.IndexCopy: "index_copy.default(T self, i dim, T index, T source)",
    Kind.IndexPut: "index_put.default(T self, T?[] indices, T values, ? accumulate=False)",
    Kind.Scatter: "scatter.src(T self, i dim, T index, T src)",
    Kind.ScatterReduce: "scatter_reduce.two(T self, i dim, T index, T src, s reduce, ? include_self=True)",
    Kind.ScatterValue: "scatter.value(T self, i dim, T index, n value)",
    Kind.Copy: "copy.default(T self, T src, - non_blocking=None)",
    Kind.SliceScatter: "slice_scatter.default(T self, T src, i dim=0, i? start=None, i? end=None, i step=1)",
    Kind.SelectScatter: "select_scatter.default(T self, T src, i dim, i index)",
    # new tensors in the form of another
    Kind.ZerosLike: "zeros_like.default(T self, dtype? dtype, "
    "- layout=None, - device=None, - pin_memory=None, - memory_format=None)",
    Kind.OnesLike: "ones_like.default(T self, dtype? dtype, "
    "- layout=None, - device=None, - pin_memory=None, - memory_format=None)",
}

TWO_RESULTS = (Kind.MaxDim, Kind.Topk, Kind.StableTopk, Kind.Sort, Kind.Dropout)

RESULTS: Final[Mapping[Kind, Count]] = {**dict.fromkeys(TWO_RESULTS, 2), Kind.Recurrent: (2, 3)}
"""How many results a call has, where it is not one."""

DRAWING: Final = (Kind.RandomNormal, Kind.RandomUniform, Kind.Bernoulli, Kind.Multinomial, Kind.Dropout)
"""Kinds of calls that draw numbers by a seed of their own."""

OBSTACLES: Final[Mapping[Kind, Mapping[str, str]]] = {
    Kind.RoiAlign: everywhere(HOST_SYNC),
    **{number: {"cuda": OWN_GENERATOR} for number in DRAWING},
}
"""Device → why a capture there cannot hold a call, by kind; all others can be held."""

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

CAST: Final = next(row for row in shape.KINDS if row.kind is Kind.Cast)


@dataclass(frozen=True, slots=True)
class TypedCall:
    """A kind of kernel for calls of one signature."""

    row: KernelKind
    signature: OperatorSignature

    @classmethod
    def of(cls, number: Kind, text: str) -> TypedCall:
        calls = OperatorSignature.parse(text)
        results = RESULTS.get(number, 1)
        layout = ",".join(filter(None, (calls.layout(), "order=i[]" if results == 1 else "")))
        values = signature(_has_its_operands(calls), inputs=(0, None), outputs=results)
        return cls(kind(number, values, layout, inplace=_inplace(calls), obstacles=OBSTACLES.get(number)), calls)


def _inplace(calls: OperatorSignature) -> tuple[int, ...]:
    """The operands that `inplace_of` allows; a call with fewer operands has fewer."""
    if calls.operators[0] in POINTWISE:
        return tuple(range(sum(argument.code in ("T", "T?", "T|n") for argument in calls.arguments)))
    return (0,) if calls.operators[0] in CHANGED | WRITTEN_LAST else ()


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
    if typed.row.kind not in RESULTS:
        fields["order"] = orders[0] if orders else ()  # type: ignore[assignment]
    elif any(orders):
        return None
    return typed.row.emit(fields, ins, outs)


def call_attrs(operator: str, operands: int, given: Mapping[str, Attr]) -> dict[str, Attr]:
    """The attributes of a call whose operands come in the order of its signature; `given` are the other arguments.

    An operator without a row has the operands `self` and `other`, as most of torch's own.
    """
    typed = BY_OPERATOR.get(operator)
    if typed is not None:
        return typed.signature.refer(operands, given)
    if any(isinstance(item, InputRef) for item in given.values()):
        return dict(given)
    return {**dict(zip(("self", "other"), map(InputRef, range(operands)), strict=False)), **given}


def _as_cast(attrs: Mapping[str, Attr], ins: Specs, outs: Specs) -> KernelSpec | None:
    """A conversion to another dtype. Conversions to float8 stay calls of torch, whose kernel rounds as it does."""
    orders, to = attrs.get(ORDERS, ()), outs[0].dtype
    is_plain = len(ins) == 1 and ins[0].shape == outs[0].shape and isinstance(orders, tuple) and not any(orders)
    return CAST.emit({"to": to}, ins, outs) if is_plain and not to.startswith("float8") else None


def _is_decided_by_data(operator: str, ins: Specs) -> bool:
    """Whether a mask among the indices decides how many elements are read or written."""
    places = {"aten.index.Tensor": ins[1:], "aten.index_put.default": ins[1:-1]}.get(operator, ())
    return any(spec.dtype in ("bool", "uint8") for spec in places)


def untyped_call(number: Kind, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What the attributes of a call of the kind Aten would be: `op`, `call` and `orders`."""
    operator, call = TYPED[number].signature.unpack(fields)
    return {"op": operator, "call": call, "orders": (fields["order"],) if "order" in fields else ()}


HIGHER_ORDER = "higher_order."

ANY = signature(inputs=(0, None), outputs=(0, None))
ATEN = kind(Kind.Aten, ANY, "op=s,call={},orders=v", version=2)
BODIES = kind(Kind.HigherOrder, ANY, "op=s,call={}", version=2, obstacles=everywhere(RUNS_BODIES))


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
    typed = as_typed(kind, attrs, ins, outs)
    if typed is not None:
        return typed
    call = {name: item for name, item in attrs.items() if name != ORDERS}
    if kind.startswith(HIGHER_ORDER):
        return _with_names(BODIES, call).emit({"op": kind, "call": call}, ins, outs)
    return _with_names(ATEN, call).emit({"op": kind, "call": call, "orders": attrs.get(ORDERS, ())}, ins, outs)


def _with_names(row: KernelKind, call: Mapping[str, Attr]) -> KernelKind:
    """`row` with the names of the arguments in its schema."""
    return replace(row, schema=row.schema.replace("{}", f"{{{','.join(call)}}}"))
