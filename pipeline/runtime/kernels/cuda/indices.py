"""Launch the check of indices: one kernel, where torch's operators are six."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch

from pipeline.runtime.kernels.base import Launch

BLOCK: Final = 256
"""Indices for a block of the kernel."""


def launch_clamp(
    index: torch.Tensor, safe: torch.Tensor, flag: torch.Tensor, low: int, high: int, ignored: int | None
) -> Launch | None:
    """The launch that clamps `index` into `safe`, and sets `flag` if that changed an element.

    Args:
        index: the indices, on a CUDA device.
        safe: of the shape and dtype of `index`, contiguous.
        flag: bool, one element.
        low: the least index.
        high: the greatest index.
        ignored: an index that stays as it is; None if there is none.

    Returns:
        The launch; None if `index` is not contiguous, has no element, or is neither int32 nor int64.
    """
    if not index.is_contiguous() or not index.numel() or index.dtype not in (torch.int32, torch.int64):
        return None
    from pipeline.runtime.kernels.cuda import index_kernel

    clamp: Any = index_kernel.clamp
    return partial(
        clamp[-(-index.numel() // BLOCK),],
        index,
        safe,
        flag.view(torch.uint8),
        low,
        high,
        0 if ignored is None else ignored,
        index.numel(),
        has_ignored=ignored is not None,
        length=BLOCK,
    )
