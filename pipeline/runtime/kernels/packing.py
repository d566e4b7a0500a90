"""Weights in oneDNN's blocked form: made once, when they are bound, and read by every context.

A packed product sums in another order than BLAS, and allocates its result, which is then copied into its place. So
packing pays only above a certain size; benchmarks/RESULTS.md has the measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from pipeline.ir.graph import TensorSpec
from pipeline.ops.fused import PLAIN, Activation
from pipeline.runtime.kernels.base import Attrs, Launch, OverloadCall, copy_result, give_result, in_turn
from pipeline.runtime.kernels.native.kernel_library import NativeLibrary
from pipeline.runtime.kernels.native.products import pack_panels
from pipeline.runtime.kernels.weight_forms import (
    Convolution,
    ConvolutionWeight,
    FusedOperands,
    PackedMemory,
    ProductWeight,
    launch_in_place,
)

PRODUCT_FROM = 2**23
"""The fewest multiplications at which a packed product is faster than BLAS, its copy included."""

ACTIVATED_FROM = 2**21
"""The same for a product with an activation, which oneDNN computes in registers."""

CONVOLUTION_FROM = 2**20
"""The fewest multiplications at which a packed convolution is faster."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight in the form that oneDNN chose for one shape of the other operand, and a bias that goes with it."""

    tensor: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        extra = 0 if self.bias is None else self.bias.nbytes
        return int(torch.ops.mkldnn._nbytes(self.tensor)) + extra

    def in_memory(self, memory: PackedMemory) -> PackedWeight:
        """See `ProductWeight`."""
        return replace(self, tensor=memory.share(self.tensor))

    def launch(self, of: FusedOperands) -> Launch | None:
        """See `ProductWeight`. oneDNN allocates its result; a sum with it takes the place of its copy."""
        try:
            rows, result = of.x.view(-1, of.x.shape[-1]), of.out.view(-1, of.out.shape[-1])
            added = None if of.other is None else of.other.view(result.shape)
        except RuntimeError:
            return None
        operator, rest = torch.ops.mkldnn._linear_pointwise.default, post_op(of.after)

        def bind(dense: torch.Tensor | None) -> Launch:
            product = OverloadCall.bind(operator, rows, self.tensor, dense, *rest)
            if added is None:
                return copy_result(product, [result])
            return give_result(product, OverloadCall.bind(torch.ops.aten.add.out, out=result), (added,))

        return _with_dense_bias(bind, of.bias)


Stored = Mapping[int, torch.Tensor]
"""By position, the operands of a call that no run can change."""


Packer = Callable[[Attrs, Sequence[TensorSpec], Stored], ProductWeight | ConvolutionWeight | None]
"""(attributes, specs of the operands, stored operands) -> the packed weight, or None where it does not pay."""


def pack_product(
    rows: int, weight: torch.Tensor | None, least: int = PRODUCT_FROM, *, native: NativeLibrary | None = None
) -> ProductWeight | None:
    """Pack the float32 matrix `weight` (columns, inner) for products with `rows` rows, where that pays.

    In panels for the kernels in C++ where the program has them, or else for oneDNN, if a product has `least`
    multiplications or more.
    """
    if weight is None or weight.dim() != 2 or weight.dtype is not torch.float32:
        return None
    panels = native and pack_panels(native, rows, weight)
    if panels:
        return panels
    if not AVAILABLE or rows * weight.numel() < least:
        return None
    return PackedWeight(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows))


def _with_dense_bias(bind: Callable[[torch.Tensor | None], Launch], bias: torch.Tensor | None) -> Launch:
    """`bind(bias)`. oneDNN reads a bias as if its elements lay side by side, whatever its strides say, so any other one
    (one number for all channels, or a view) is copied at each launch."""
    if bias is None or bias.is_contiguous():
        return bind(bias)
    dense = torch.empty(bias.shape, dtype=bias.dtype)
    return in_turn(partial(dense.copy_, bias), bind(dense))


def pack_convolution(
    x: TensorSpec, weight: torch.Tensor | None, shape: Convolution, bias: torch.Tensor | None = None
) -> PackedWeight | None:
    """Pack the float32 kernels `weight` for images of the sizes of `x`, where that pays."""
    if weight is None or weight.dim() != 4 or weight.dtype is not torch.float32 or not AVAILABLE:
        return None
    if x.numel // x.sizes[1] * weight.numel() < CONVOLUTION_FROM:
        return None
    kernels = weight.contiguous(memory_format=torch.channels_last)
    tensor = torch.ops.mkldnn._reorder_convolution_weight(
        kernels, shape.pads, shape.strides, shape.dilations, shape.groups, x.sizes
    )
    return PackedWeight(tensor, bias)


def launch_convolution(packed: PackedWeight, of: FusedOperands, shape: Convolution) -> Launch:
    """The convolution with a packed weight.

    Onto images with channels last oneDNN adds its result: to `other`, or to zeros, so that nothing is allocated; this
    is faster than a copy. Any other result is copied.
    """
    x, out, bias, other, after = of
    if other is not None and after.name not in ONTO:
        onto = launch_convolution(packed, of._replace(after=PLAIN), shape)
        return in_turn(onto, launch_in_place(after, out))
    adds = after.name in ONTO and out.is_contiguous(memory_format=torch.channels_last)
    add, convolve = torch.ops.mkldnn._convolution_pointwise_.binary, torch.ops.mkldnn._convolution_pointwise.default

    def bind(dense: torch.Tensor | None) -> Launch:
        if adds:
            begin = out.zero_ if other is None else None if is_same_memory(out, other) else partial(out.copy_, other)
            return in_turn(begin, OverloadCall.bind(add, out, x, packed.tensor, dense, *_onto(shape, after)))
        if other is None:
            rest = (*_settings_of(shape), *post_op(after))
            return copy_result(OverloadCall.bind(convolve, x, packed.tensor, dense, *rest), [out])
        plain = (*_settings_of(shape), "none", (), "")
        return partial(_convolve_and_add, out, other, after.name, x, packed.tensor, dense, *plain)

    return _with_dense_bias(bind, bias)


def is_same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.data_ptr() == second.data_ptr() and first.stride() == second.stride() and first.shape == second.shape


def _settings_of(shape: Convolution) -> tuple[Any, ...]:
    return (shape.pads, shape.strides, shape.dilations, shape.groups)


def _onto(shape: Convolution, after: Activation) -> tuple[Any, ...]:
    """Arguments of oneDNN's convolution that is added to a tensor, after the bias."""
    return (*_settings_of(shape), "add", 1.0, ONTO[after.name], (), None)


def post_op(after: Activation) -> tuple[str, tuple[float, ...], str]:
    """Arguments of oneDNN's products and convolutions: the activation's name, parameters, and algorithm."""
    name, algorithm = POST_OPS.get(after.name, (after.name, ""))
    return name, after.numbers, algorithm


POST_OPS = {"gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "silu": ("swish", ""), "clip": ("hardtanh", "")}
"""oneDNN's name and algorithm, where the name of the activation is another."""

ONTO = {"none": None, "relu": "relu"}
"""The post-ops that oneDNN applies after it added, as torch calls them there."""


def _convolve_and_add(out: torch.Tensor, other: torch.Tensor, after: str, *args: Any) -> None:
    torch.add(torch.ops.mkldnn._convolution_pointwise.default(*args), other, out=out)
    if after == "relu":
        out.clamp_min_(0)


AVAILABLE = torch.backends.mkldnn.is_available() and all(
    hasattr(torch.ops.mkldnn, name)
    for name in (
        *("_reorder_linear_weight", "_linear_pointwise"),
        *("_reorder_convolution_weight", "_convolution_pointwise", "_convolution_pointwise_"),
    )
)
"""Whether this build of torch has oneDNN with packed weights."""
