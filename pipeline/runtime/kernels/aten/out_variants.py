"""Write the result of any torch operator into given storage: by its overload with `out=`, or by a copy.

Some overloads with `out=` take the memory of the result for rows, whatever its strides are (`avg_pool3d`), or for the
memory format of an operand (`native_batch_norm`), and `triu` even writes beyond it. So such an overload is only called
where operands and results lie in rows, or where the operator is known to take any order.
"""

from __future__ import annotations

from functools import cache

import torch

from pipeline.ops.aten import takes_any_order
from pipeline.runtime.kernels.aten.call import AtenCall
from pipeline.runtime.kernels.base import Launch, Outs
from pipeline.runtime.kernels.launches import OverloadCall, copy_result
from pipeline.runtime.torch_args import tensors_in


def write_out(call: AtenCall, outs: Outs) -> Launch:
    """Any operator, written into `outs`."""
    variant = _out_variant(call.operator)
    if variant is None or call.kind in FUNCTIONAL or not may_write_into(call, outs):
        return make_and_copy(call, outs)
    overload, names = variant
    masked = False in call.given.get("output_mask", ())  # some results are None, or without elements
    if masked or len(names) != len(outs):
        return make_and_copy(call, outs)
    return OverloadCall.bind(overload, *call.args, **call.kwargs, **dict(zip(names, outs, strict=True)))


def may_write_into(call: AtenCall, outs: Outs) -> bool:
    """Whether the overload with `out=` writes what it should into `outs`, given the strides of all tensors."""
    tensors = (*tensors_in(list(call.given.values())), *outs)
    return takes_any_order(call.kind) or all(tensor.is_contiguous() for tensor in tensors)


def make_and_copy(call: AtenCall, outs: Outs) -> Launch:
    """Run the operator and copy its results into `outs`."""
    return copy_result(OverloadCall.bind(call.operator, *call.args, **call.kwargs), outs, call.unread)


@cache
def _out_variant(operator: torch._ops.OpOverload) -> tuple[torch._ops.OpOverload, tuple[str, ...]] | None:
    """The overload with the same arguments and one `out=` for each result, and their names."""
    wanted = [(item.name, str(item.type)) for item in operator._schema.arguments]
    if not wanted or any(str(item.type) != "Tensor" for item in operator._schema.returns):
        return None
    packet = operator.overloadpacket
    for name in packet.overloads():
        overload = getattr(packet, name)
        items = overload._schema.arguments
        outs = tuple(item.name for item in items if item.is_out)
        rest = [(item.name, str(item.type)) for item in items if not item.is_out]
        if rest == wanted and outs and len(outs) == len(operator._schema.returns):
            return overload, outs
    return None


FUNCTIONAL = frozenset(
    {
        "aten.adaptive_avg_pool2d.default",  # the mean of a whole map in another order
        "aten.adaptive_avg_pool3d.default",
        "aten.linalg_lstsq.default",
        "aten.fft_ihfft2.default",  # writes nothing where the result is a conjugate view
        "aten.fft_ihfftn.default",
        "aten.binary_cross_entropy.default",  # resizes the result, and writes all differences to it
        "aten.huber_loss.default",
        "aten.mse_loss.default",
        "aten.smooth_l1_loss.default",
        "aten.soft_margin_loss.default",
    }
)
"""Operators whose overload with `out=` does not do the same."""
