"""Updates of parameters by Adam, one launch for each parameter, and the scalars of a train step."""

from __future__ import annotations

from functools import partial

import torch

from pipeline.ops import Kind
from pipeline.runtime.kernels.base import Attrs, Ins, Launch, Outs, in_turn
from pipeline.runtime.kernels.native.kernel_library import (
    NativeKernel,
    NativeLibrary,
    are_floats,
    is_dense_like,
    is_for_one_thread,
)
from pipeline.runtime.kernels.optimizer import group_tensors, prepare_update


def adam(library: NativeLibrary, ins: Ins, outs: Outs, attrs: Attrs) -> Launch | None:
    *operands, step, rate, skip = ins
    if not are_floats(*operands, *outs, step, skip) or rate.dtype is not torch.float64:
        return None
    if not all(map(is_for_one_thread, outs)):
        return None
    gradients, copies = prepare_update(operands, outs, attrs["count"])
    groups = group_tensors(outs, attrs["count"])
    if not all(
        is_dense_like(out, gradient) for group in groups for out, gradient in zip(group, gradients, strict=True)
    ):
        return None
    decay = 0 if attrs["weight_decay"] == 0 else 2 if attrs["decoupled"] else 1
    numbers = [float(attrs[name]) for name in ("beta1", "beta2", "epsilon", "weight_decay")]
    kinds = (decay, int(attrs["maximize"]), int(len(groups) == 4))
    updates = [
        library.launch("adam", written, [gradient, step, rate, skip], (gradient.numel(), *numbers, *kinds))
        for gradient, *written in zip(gradients, *groups, strict=True)
    ]
    return in_turn(*(partial(target.copy_, source) for target, source in copies), *updates)


def not_finite(library: NativeLibrary, ins: Ins, outs: Outs, _: Attrs) -> Launch | None:
    return library.launch("is_not_finite", outs, ins, ()) if are_floats(*ins, *outs) else None


def count_step(library: NativeLibrary, ins: Ins, outs: Outs, _: Attrs) -> Launch | None:
    return library.launch("count_step", outs, ins, ()) if are_floats(*ins, *outs) else None


KERNELS: dict[Kind, NativeKernel] = {Kind.Adam: adam, Kind.NotFinite: not_finite, Kind.CountStep: count_step}
