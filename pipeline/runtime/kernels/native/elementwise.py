"""Activations of single numbers."""

from __future__ import annotations

from functools import partial

import torch

from pipeline.ops import Kind
from pipeline.runtime.kernels.base import Attrs, Ins, Launch, Outs
from pipeline.runtime.kernels.native.activations import settings_of
from pipeline.runtime.kernels.native.kernel_library import (
    NativeKernel,
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


def apply(name: str, algorithm: str, library: NativeLibrary, ins: Ins, outs: Outs, _: Attrs) -> Launch | None:
    return launch_activation(library, ins[0], outs[0], PostOp(name, algorithm))


def gelu(library: NativeLibrary, ins: Ins, outs: Outs, attrs: Attrs) -> Launch | None:
    return launch_activation(library, ins[0], outs[0], PostOp("gelu", attrs["approximate"]))


KERNELS: dict[Kind, NativeKernel] = {
    Kind.Gelu: gelu,
    Kind.Relu: partial(apply, "relu", ""),
    Kind.Silu: partial(apply, "swish", ""),
    Kind.Sigmoid: partial(apply, "sigmoid", ""),
    Kind.Tanh: partial(apply, "tanh", ""),
    Kind.HardSwish: partial(apply, "hardswish", ""),
}
