"""Norms of half precision with weights in float32, as autocast makes them: computed in float32, and rounded at the end.

torch's fake kernels give the statistics of such a norm the dtype of its input, and the gradient of the input the dtype
of the weights; the kernels of the CPU do the opposite. A recording that believed the fake kernels would not run. With
operands of one dtype both agree, and the numbers are those of the mixed kernels, which compute in float32, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class MixedNorms(TorchDispatchMode):
    """Calls norms whose operands are of half precision and float32 with all of them in float32."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        halves = HALVES.get(func.overloadpacket.__name__, 0)
        if not halves or args[0].dtype not in (torch.bfloat16, torch.float16) or not _has_float32(args[halves:]):
            return func(*args, **kwargs)
        result, *others = func(*(half.float() for half in args[:halves]), *args[halves:], **kwargs)
        return None if result is None else result.to(args[0].dtype), *others


def _has_float32(args: Sequence[Any]) -> bool:
    return any(isinstance(arg, torch.Tensor) and arg.dtype == torch.float32 for arg in args)


HALVES: Final[Mapping[str, int]] = {
    "native_group_norm": 1,
    "native_group_norm_backward": 2,
    "native_layer_norm": 1,
    "native_layer_norm_backward": 2,
    "native_batch_norm": 1,
    "native_batch_norm_backward": 2,
    "_native_batch_norm_legit": 1,
    "_native_batch_norm_legit_functional": 1,
    "_native_batch_norm_legit_no_training": 1,
}
"""Operator → how many of its first operands are the input and its gradient, which may be of half precision."""
