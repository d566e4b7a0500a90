"""Whether a call of torch waits for a value: torch's profiler sees the calls inside of its kernels, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def reads_host(function: Callable[..., Any], *operands: Any) -> bool:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        function(*operands)
    return any(event.name in ("aten::_local_scalar_dense", "aten::nonzero") for event in seen.events() or ())
