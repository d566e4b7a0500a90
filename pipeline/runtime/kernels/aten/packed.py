"""Operators of torch with a packed weight: products with a stored matrix, and convolutions over two dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pipeline.ir import InputRef
from pipeline.ir.graph import TensorSpec
from pipeline.ops import Kind
from pipeline.ops.aten import TYPED
from pipeline.runtime.kernels.aten.call import AtenCall, CallTemplate
from pipeline.runtime.kernels.base import Attrs, Launch
from pipeline.runtime.kernels.packing import PackedWeight, Stored, launch_convolution, pack_convolution, pack_product
from pipeline.runtime.kernels.weight_forms import Convolution, ProductWeight

Given = Mapping[str, Any]


def may_pack(kind: Kind) -> bool:
    """Whether calls of this kind may have a weight to pack."""
    return kind is Kind.Aten or any(
        name in PRODUCTS or name in CONVOLUTIONS for name in TYPED[kind].signature.operators
    )


def pack_call(
    template: CallTemplate, specs: Sequence[TensorSpec], stored: Stored, attrs: Attrs
) -> ProductWeight | None:
    """The weight of a call in the form for it, where one is stored and packing pays."""
    names = PRODUCTS.get(template.kind) or CONVOLUTIONS.get(template.kind)
    if names is None:
        return None
    x, weight = (template.tensors.get(name) for name in names)
    if not (isinstance(x, InputRef) and isinstance(weight, InputRef)) or weight.index not in stored:
        return None
    spec, tensor = specs[x.index], stored[weight.index]
    if template.kind in CONVOLUTIONS:
        shape = _convolution(template.fixed)
        return pack_convolution(spec, tensor, shape) if shape and spec.rank == 4 else None
    if spec.rank < 2 or any(template.fixed.get(name, 1) != 1 for name in ("alpha", "beta")):
        return None
    if template.kind == "aten.bmm.default":
        if tensor.dim() != 3 or tensor.stride(0) != 0:  # one matrix for all of the batch
            return None
        tensor = tensor[0]
    if tensor.dim() != 2:
        return None
    bias = template.tensors.get("self") if template.kind == "aten.addmm.default" else None
    if isinstance(bias, InputRef) and specs[bias.index].rank != 1:
        return None
    columns_first = tensor if template.kind == "aten.linear.default" else tensor.t()
    return pack_product(spec.numel // max(spec.sizes[-1], 1), columns_first, native=attrs.get("native"))


def launch_packed(call: AtenCall, packed: PackedWeight, out: torch.Tensor) -> Launch | None:
    """The call with its packed weight; None where strides do not allow it."""
    given = call.given
    if call.kind in CONVOLUTIONS:
        shape = _convolution(given)
        return launch_convolution(packed, given["input"], given.get("bias"), out, shape) if shape else None
    bias = given["self"] if call.kind == "aten.addmm.default" else given.get("bias")
    return packed.launch_product(given[PRODUCTS[call.kind][0]], bias, out)


def _convolution(given: Given) -> Convolution | None:
    if given.get("transposed") or not all(isinstance(given.get(name, 0), int | list) for name in ("padding", "stride")):
        return None
    sizes = [_pair(given.get(name, default)) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))]
    return Convolution(sizes[0], sizes[1], sizes[2], given.get("groups", 1))


def _pair(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else (*value, *value)[-2:]


PRODUCTS = {
    "aten.linear.default": ("input", "weight"),
    "aten.addmm.default": ("mat1", "mat2"),
    "aten.mm.default": ("self", "mat2"),
    "aten.bmm.default": ("self", "mat2"),
    "aten.matmul.default": ("self", "other"),
}
"""Kind → its operand with rows, and its matrix."""

CONVOLUTIONS = {"aten.conv2d.default": ("input", "weight"), "aten.convolution.default": ("input", "weight")}
