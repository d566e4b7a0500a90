"""Launches of several calls, in forms that a recorder can read: one after the other, or a result that is copied.

A launch that is a function of Python can only be called. One in a form of this module, over functions of torch, can be
read as calls of operators (`pipeline.runtime.capture.call_graphs`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch

from pipeline.runtime.kernels.base import Launch
from pipeline.runtime.run_errors import ResultMismatch
from pipeline.runtime.torch_args import tensors_in


class OverloadCall(partial[Any]):
    """A call of the function of an OpOverload, which costs 1 µs less than to call that itself."""

    overload: torch._ops.OpOverload

    @classmethod
    def bind(cls, overload: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> OverloadCall:
        call = cls(overload._op, *args, **kwargs)
        call.overload = overload
        return call


def in_turn(*launches: Launch | None) -> Launch:
    """One launch after the other; those that are None are left out."""
    wanted = [launch for launch in launches if launch is not None]
    return wanted[0] if len(wanted) == 1 else partial(call_in_turn, tuple(wanted))


def call_in_turn(launches: Sequence[Launch]) -> None:
    for launch in launches:
        launch()


def give_result(make: Launch, call: OverloadCall, rest: tuple[Any, ...]) -> Launch:
    """Give the result of `make` to `call`, before further arguments, without a copy."""
    return partial(call_with_result, make, call, rest)


def call_with_result(make: Launch, call: OverloadCall, rest: tuple[Any, ...]) -> None:
    call(make(), *rest)


def copy_result(make: Callable[[], Any], outs: Sequence[torch.Tensor], unread: Collection[int] = ()) -> Launch:
    """Copy the results of `make` into `outs`, except those that nobody reads."""
    if len(outs) != 1:
        return partial(copy_all, make, outs, unread)
    return partial(copy_one, make, outs[0])


def copy_one(make: Callable[[], Any], out: torch.Tensor) -> None:
    result = make()
    if type(result) is not torch.Tensor:
        (result,) = tensors_in(result)
    if result.shape != out.shape or result.dtype is not out.dtype:
        raise _misfit(result, out)
    out.copy_(result)


def copy_all(make: Callable[[], Any], outs: Sequence[torch.Tensor], unread: Collection[int]) -> None:
    """Results that nobody reads are skipped: some (offsets that only a gradient needs) have other sizes in traces, and
    the gradients that a mask leaves out are None.
    """
    made = make()
    results = made if isinstance(made, tuple) and len(made) == len(outs) else list(tensors_in(made))
    for at, (result, out) in enumerate(zip(results, outs, strict=True)):
        if at in unread:
            continue
        if result is None or result.shape != out.shape or not _holds(out.dtype, result.dtype):
            raise _misfit(result, out)
        out.copy_(result)


def _holds(wide: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether `wide` is `dtype` or a wider float: only traces have float32 statistics of a half batch_norm."""
    floating = wide.is_floating_point and dtype.is_floating_point
    return dtype is wide or (floating and torch.promote_types(wide, dtype) is wide)


def _misfit(result: torch.Tensor | None, out: torch.Tensor) -> ResultMismatch:
    made = "nothing" if result is None else f"{result.dtype}{list(result.shape)}"
    return ResultMismatch(
        f"it made {made}, and the graph says {out.dtype}{list(out.shape)}; "
        "a trace on another device than the CPU may differ there, and torch before 2.13 gives the states of an LSTM "
        "one dim more than they have: trace the model on the CPU, or with a newer torch"
    )
