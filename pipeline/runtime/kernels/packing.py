"""Weights in oneDNN's blocked form: made once, when they are bound, and read by every context.

A packed product sums in another order than BLAS, and allocates its result, which is then copied into its place. So
packing pays from a certain size on only; benchmarks/RESULTS.md has the measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from pipeline.ir.graph import TensorSpec
from pipeline.ops.fused import PLAIN, Activation
from pipeline.runtime.kernels.base import Attrs, Launch, Outs, OverloadCall, copy_result, give_result, in_turn
from pipeline.runtime.kernels.blocked import pack_blocks
from pipeline.runtime.kernels.native.kernel_library import NativeLibrary
from pipeline.runtime.kernels.native.products import NativePair, pack_panels
from pipeline.runtime.kernels.weight_forms import (
    Convolution,
    ConvolutionWeight,
    FusedOperands,
    PackedMemory,
    PairWeight,
    ProductWeight,
    StoredPair,
    launch_in_place,
)

PRODUCT_FROM = 2**23
"""Multiplications from which a packed product is faster than BLAS, its copy included."""

ACTIVATED_FROM = 2**21
"""The same for a product with an activation, which oneDNN computes in registers."""

CONVOLUTION_FROM = 2**20
"""Multiplications from which a packed convolution is faster."""


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


@dataclass(frozen=True, slots=True)
class PackedPair(StoredPair[PackedWeight]):
    """The matrices of two products in a row, as kernels of convolutions over images of one column."""

    def launch_pair(
        self,
        x: torch.Tensor,
        biases: tuple[torch.Tensor | None, torch.Tensor | None],
        other: torch.Tensor | None,
        outs: Outs,
        after: Activation,
    ) -> Launch | None:
        """See `PairWeight`. The products are added to what is in the result then."""
        out = outs[0]
        onto = launch_pair_onto(self, x, biases, out, after)
        copy = None if other is None or is_same_memory(out, other) else partial(out.copy_, other)
        return onto and in_turn(out.zero_ if other is None else copy, onto)


Stored = Mapping[int, torch.Tensor]
"""By position, the operands of a call that no run can change."""


Packer = Callable[[Attrs, Sequence[TensorSpec], Stored], ProductWeight | ConvolutionWeight | PairWeight | None]
"""(attributes, specs of the operands, stored operands) -> the packed weight, or None where it does not pay."""


def pack_product(
    rows: int, weight: torch.Tensor | None, least: int = PRODUCT_FROM, *, native: NativeLibrary | None = None
) -> ProductWeight | None:
    """Pack the float32 matrix `weight` (columns, inner) for products with `rows` rows, where that pays.

    In panels for the kernels in C++ where the program has them; in blocks for numpy's small kernels; or else for
    oneDNN, if a product has `least` multiplications or more.
    """
    if weight is None or weight.dim() != 2 or weight.dtype is not torch.float32:
        return None
    panels = native and pack_panels(native, rows, weight)
    if panels:
        return panels
    blocks = pack_blocks(rows, weight)
    if blocks is not None:
        return blocks
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


POINT = Convolution((1, 1), (0, 0), (1, 1), 1)
"""Of kernels of one pixel: a product of the pixels with a matrix."""


def pack_pair(
    rows: int, first: torch.Tensor, second: torch.Tensor, native: NativeLibrary | None = None
) -> PairWeight | None:
    """Pack the matrices (columns, inner) of two products with `rows` rows, where that pays for both.

    In panels for the kernels in C++ where the program has them, or else for oneDNN.
    """
    if native is not None and all(item.dim() == 2 and item.dtype is torch.float32 for item in (first, second)):
        panels = pack_panels(native, rows, first), pack_panels(native, rows, second)
        if panels[0] is not None and panels[1] is not None:
            return NativePair(panels[0], panels[1])
    one, other = (
        pack_convolution(TensorSpec((1, weight.shape[1], rows, 1), "float32"), weight[:, :, None, None], POINT)
        for weight in (first, second)
    )
    return None if one is None or other is None else PackedPair(one, other)


def launch_pair_onto(
    packed: PackedPair, x: torch.Tensor, biases: Sequence[torch.Tensor | None], out: torch.Tensor, after: Activation
) -> Launch | None:
    """Add both products, with `after` between them, to `out`; None where strides cannot show rows.

    oneDNN writes its result into a given place only as a convolution that adds to it, which is why products are
    written as convolutions. It allocates what is between them, which the second one reads from there.
    """
    try:
        pixels, result = (tensor.view(1, -1, 1, tensor.shape[-1]).permute(0, 3, 1, 2) for tensor in (x, out))
    except RuntimeError:
        return None
    convolve, add = torch.ops.mkldnn._convolution_pointwise.default, torch.ops.mkldnn._convolution_pointwise_.binary
    first, second = packed.first.tensor, packed.second.tensor
    rest = (*_settings_of(POINT), *post_op(after))
    return _with_dense_bias(
        lambda one: _with_dense_bias(
            lambda other: give_result(
                OverloadCall.bind(convolve, pixels, first, one, *rest),
                OverloadCall.bind(add, result),
                (second, other, *_onto(POINT, PLAIN)),
            ),
            biases[1],
        ),
        biases[0],
    )


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
