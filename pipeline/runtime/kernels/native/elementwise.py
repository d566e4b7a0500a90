"""Activations of single numbers."""

from __future__ import annotations

import torch

from pipeline.runtime.kernels.base import Launch
from pipeline.runtime.kernels.native.activations import settings_of
from pipeline.runtime.kernels.native.kernel_library import (
    NativeLibrary,
    are_floats,
    is_dense_like,
    is_for_one_thread,
)
from pipeline.runtime.kernels.post_ops import PostOp


def launch_activation(library: NativeLibrary, x: torch.Tensor, out: torch.Tensor, after: PostOp) -> Launch | None:
    if not are_floats(x, out) or not x.is_contiguous() or not is_dense_like(out, x) or not is_for_one_thread(out):
        return None
    return library.launch("activate_all", [out], [x], (x.numel(), *settings_of(after)))
