"""Write the result of any torch operator into given storage: by its overload with `out=`, or by a copy."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache, partial
from typing import Any

import torch

from pipeline.runtime.kernels.aten.call import AtenCall
from pipeline.runtime.kernels.base import Launch, Outs
from pipeline.runtime.run_errors import ResultMismatch
from pipeline.runtime.torch_args import tensors_in

__all__ = ["copy_result", "make_and_copy", "write_out"]


def write_out(call: AtenCall, outs: Outs) -> Launch:
    """Any operator, written into `outs`. Launches hold the function behind an OpOverload: 0.5 µs less a call."""
    variant = _out_variant(call.operator)
    if variant is None or call.kind in FUNCTIONAL:
        return make_and_copy(call, outs)
    overload, names = variant
    if len(names) != len(outs):  # some results are None, as those that a mask of `…_backward` leaves out
        return make_and_copy(call, outs)
    return partial(overload._op, *call.args, **call.kwargs, **dict(zip(names, outs, strict=True)))


def make_and_copy(call: AtenCall, outs: Outs) -> Launch:
    """Run the operator and copy its results into `outs`."""
    return copy_result(partial(call.operator._op, *call.args, **call.kwargs), outs, call.unread)


def copy_result(make: Callable[[], Any], outs: Outs, unread: Collection[int]) -> Launch:
    """Copy the results of `make` into `outs`, except those that nobody reads."""
    if len(outs) != 1:
        return partial(_copy_all, make, outs, unread)
    return partial(_copy_one, make, outs[0])


def _copy_one(make: Callable[[], Any], out: torch.Tensor) -> None:
    result = make()
    if type(result) is not torch.Tensor:
        (result,) = tensors_in(result)
    if result.shape != out.shape or result.dtype is not out.dtype:
        raise _misfit(result, out)
    out.copy_(result)


def _copy_all(make: Callable[[], Any], outs: Outs, unread: Collection[int]) -> None:
    """Results that nobody reads are skipped: some (offsets that only a gradient needs) have other sizes in traces."""
    for at, (result, out) in enumerate(zip(tensors_in(make()), outs, strict=True)):
        if at in unread:
            continue
        if result.shape != out.shape or not _holds(out.dtype, result.dtype):
            raise _misfit(result, out)
        out.copy_(result)


def _holds(wide: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether `wide` is `dtype` or a wider float: only traces have float32 statistics of a half batch_norm."""
    floating = wide.is_floating_point and dtype.is_floating_point
    return dtype is wide or (floating and torch.promote_types(wide, dtype) is wide)


def _misfit(result: torch.Tensor, out: torch.Tensor) -> ResultMismatch:
    return ResultMismatch(
        f"it made {result.dtype}{list(result.shape)}, and the graph says {out.dtype}{list(out.shape)}; "
        "a trace on another device than the CPU may differ there, and torch before 2.13 gives the states of an LSTM "
        "one dim more than they have: trace the model on the CPU, or with a newer torch"
    )


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
