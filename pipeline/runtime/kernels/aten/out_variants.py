"""Write the result of any torch operator into given storage: by its overload with `out=`, or by a copy."""

from __future__ import annotations

from functools import cache

import torch

from pipeline.runtime.kernels.aten.call import AtenCall
from pipeline.runtime.kernels.base import Launch, Outs
from pipeline.runtime.kernels.launches import OverloadCall, copy_result

__all__ = ["make_and_copy", "write_out"]


def write_out(call: AtenCall, outs: Outs) -> Launch:
    """Any operator, written into `outs`."""
    variant = _out_variant(call.operator)
    if variant is None or call.kind in FUNCTIONAL:
        return make_and_copy(call, outs)
    overload, names = variant
    if len(names) != len(outs):  # some results are None, as those that a mask of `…_backward` leaves out
        return make_and_copy(call, outs)
    return OverloadCall.bind(overload, *call.args, **call.kwargs, **dict(zip(names, outs, strict=True)))


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
