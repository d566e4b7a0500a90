"""Kernels of the fused kinds: by oneDNN where the weight is packed, else one operation of torch after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from pipeline.ir.graph import TensorSpec
from pipeline.ops import Kind
from pipeline.runtime.kernels.attention import AttentionCall, AttentionOperands, attention_call
from pipeline.runtime.kernels.base import Attrs, Ins, Kernel, Launch, Outs, OverloadCall, in_turn
from pipeline.runtime.kernels.native.convolutions import pack_native_convolution
from pipeline.runtime.kernels.packing import (
    ACTIVATED_FROM,
    PRODUCT_FROM,
    PackedWeight,
    Packer,
    Stored,
    launch_convolution,
    pack_convolution,
    pack_product,
)
from pipeline.runtime.kernels.products import multiply, multiply_and_activate
from pipeline.runtime.kernels.weight_forms import (
    Convolution,
    ConvolutionWeight,
    FusedOperands,
    PackedMemory,
    ProductWeight,
    activation_of,
    launch_in_place,
)

CHANNELS_FIRST = (0, 3, 1, 2)


def linear(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    """The result is never the memory of the tensor that is added: kernels write partial sums before they read it."""
    (x, weight), (other, bias), out = ins[:2], split_optional(ins[2:], attrs["add"], attrs["bias"]), outs[0]
    packed = attrs.get("packed")
    launch = packed.launch(FusedOperands(x, out, bias, other, activation_of(attrs))) if packed else None
    if launch is not None:
        return launch
    matrix = weight.t() if attrs["trans"] else weight
    if x.is_cuda and bias is not None and other is None:
        launch = multiply_and_activate(x, matrix, bias, out, attrs["activation"])
        if launch is not None:
            return launch
    product = multiply(x, matrix, bias, out)
    add_other = None if other is None else partial(torch.add, out, other, out=out)
    return in_turn(product, launch_in_place(activation_of(attrs), out), add_other)


def split_optional(rest: Ins, *flags: bool) -> list[torch.Tensor | None]:
    """The operands that a call may lack, in order, each where its flag says that it is there."""
    left = iter(rest)
    return [next(left) if flag else None for flag in flags]


def pack_linear(attrs: Attrs, specs: Sequence[TensorSpec], stored: Stored) -> ProductWeight | None:
    weight = stored.get(1)
    if weight is None:
        return None
    rows = specs[0].numel // max(specs[0].sizes[-1], 1)
    least = PRODUCT_FROM if attrs["activation"] == "none" else ACTIVATED_FROM
    return pack_product(rows, weight if attrs["trans"] else weight.t(), least, native=attrs.get("native"))


class ConvOperands(NamedTuple):
    """The operands of a fused convolution by name. A tuple, so that a context finds the tensors in it."""

    x: torch.Tensor
    weight: torch.Tensor
    other: torch.Tensor | None
    bias: torch.Tensor | None
    norm: Sequence[torch.Tensor]

    @classmethod
    def of(cls, ins: Ins, attrs: Attrs) -> ConvOperands:
        rest = list(ins[2:])
        other = rest.pop(0) if attrs["add"] else None
        bias = rest.pop(0) if attrs["bias"] else None
        x = ins[0]
        if attrs["channels_last"]:
            x, other = x.permute(CHANNELS_FIRST), None if other is None else other.permute(CHANNELS_FIRST)
        return cls(x, ins[1], other, bias, rest)


def conv(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    of = ConvOperands.of(ins, attrs)
    out = outs[0].permute(CHANNELS_FIRST) if attrs["channels_last"] else outs[0]
    packed: ConvolutionWeight | None = attrs.get("packed")
    after = activation_of(attrs)
    bias = packed.bias if packed and of.norm else of.bias
    launch = packed.launch(FusedOperands(of.x, out, bias, of.other, after)) if packed else None
    return launch or partial(_convolve_in_turn, out, of, attrs, launch_in_place(after, out))


@dataclass(frozen=True, slots=True)
class BlockedKernels:
    """Kernels of a convolution as oneDNN keeps them."""

    weight: PackedWeight
    shape: Convolution

    @property
    def bias(self) -> torch.Tensor | None:
        return self.weight.bias

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def in_memory(self, memory: PackedMemory) -> BlockedKernels:
        """See `ConvolutionWeight`."""
        return replace(self, weight=self.weight.in_memory(memory))

    def launch(self, of: FusedOperands) -> Launch:
        """See `ConvolutionWeight`."""
        return launch_convolution(self.weight, of, self.shape)


def pack_conv(attrs: Attrs, specs: Sequence[TensorSpec], stored: Stored) -> ConvolutionWeight | None:
    """Multiply the normalisation into the weight, one factor for each of its output channels."""
    weight, x = stored.get(1), specs[0]
    if weight is None:
        return None
    if attrs["channels_last"]:
        x = TensorSpec(tuple(x.shape[axis] for axis in CHANNELS_FIRST), x.dtype)
    first = 2 + attrs["add"]
    bias = stored.get(first) if attrs["bias"] else None
    if not attrs["norm"]:
        return pack_kernels(attrs, x, weight)
    first += attrs["bias"]
    norm = [stored.get(at) for at in range(first, first + 4)]
    if any(tensor is None for tensor in norm) or (attrs["bias"] and bias is None):
        return None
    scale, shift, mean, variance = (tensor.double() for tensor in norm if tensor is not None)
    factor = scale / torch.sqrt(variance + attrs["epsilon"])
    offset = shift + ((0 if bias is None else bias.double()) - mean) * factor
    folded = (weight.double() * factor.view(-1, 1, 1, 1)).float()
    return pack_kernels(attrs, x, folded, offset.float())


def pack_kernels(
    attrs: Attrs, x: TensorSpec, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> ConvolutionWeight | None:
    """For the kernels in C++ where the program has them and they are faster, or else for oneDNN where that pays."""
    shape = convolution(attrs)
    native = attrs.get("native") if attrs["channels_last"] else None
    found = native and pack_native_convolution(native, x, weight, shape, bias)
    if found:
        return found
    packed = pack_convolution(x, weight, shape, bias)
    return packed and BlockedKernels(packed, shape)


def convolution(attrs: Attrs) -> Convolution:
    return Convolution(attrs["strides"], attrs["pads"], attrs["dilations"], attrs["group"])


def _convolve_in_turn(out: torch.Tensor, of: ConvOperands, attrs: Attrs, after: Launch | None) -> None:
    y = torch.conv2d(of.x, of.weight, of.bias, attrs["strides"], attrs["pads"], attrs["dilations"], attrs["group"])
    if of.norm:
        scale, shift, mean, variance = of.norm
        y = torch.batch_norm(y, scale, shift, mean, variance, False, 0.0, attrs["epsilon"], False)
    if of.other is None:
        out.copy_(y)
    else:
        torch.add(y, of.other, out=out)
    if after is not None:
        after()


def attention(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    """Torch's kernels make (batch, tokens, heads, width) in memory, which is how the result is stored."""
    query, key, value = ins[:3]
    mask = ins[3].expand(*query.shape[:3], key.shape[2]) if attrs["mask"] else None
    call = attention_call(attrs["backend"], query.device.type, mask=attrs["mask"])
    return partial(_attend_into, outs[0].permute(0, 2, 1, 3), call, (query, key, value, mask), attrs)


def _attend_into(out: torch.Tensor, call: AttentionCall, operands: AttentionOperands, attrs: Attrs) -> None:
    query, key, value, mask = operands
    out.copy_(call(query, key, value, mask, attrs["causal"], attrs["scale"]))


def small_attention(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    """By the scores of one batch entry after the other: a call of torch's kernel costs as much as these products."""
    launches: list[Launch] = []
    for query, key, value, out, scores in zip(*ins, outs[0].permute(0, 2, 1, 3), outs[1], strict=True):
        multiply = partial(torch.baddbmm, scores, query, key.transpose(1, 2), beta=0, alpha=attrs["scale"], out=scores)
        weigh = partial(torch.softmax, scores, -1, out=scores)
        launches += [multiply, weigh, partial(torch.bmm, scores, value, out=out)]
    return in_turn(*launches)


def relu_product(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    """By torch's own kernels, one after the other."""
    (a, b, *more), out = ins, outs[0]
    bias, gate = more[0] if attrs["bias"] else None, more[-1] if attrs["gate"] else None
    product = partial(torch.mm, a, b, out=out) if bias is None else partial(torch.addmm, bias, a, b, out=out)
    if gate is None:
        return in_turn(product, partial(torch.clamp_min, out, 0, out=out))
    return in_turn(product, OverloadCall.bind(GATE, out, gate, 0, grad_input=out))


GATE = torch.ops.aten.threshold_backward.grad_input


KERNELS: dict[Kind, Kernel] = {
    Kind.LinearPointwise: linear,
    Kind.ConvPointwise: conv,
    Kind.ScaledDotProductAttention: attention,
    Kind.SmallAttention: small_attention,
    Kind.ReluProduct: relu_product,
}

PACKERS: dict[Kind, Packer] = {
    Kind.LinearPointwise: pack_linear,
    Kind.ConvPointwise: pack_conv,
}
