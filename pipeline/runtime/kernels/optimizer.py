"""Kernels that update parameters: they write parameters and moments in place.

Torch's fused optimizers take all parameters in one launch, and so does Adam in Triton on a GPU. In C++ Adam has a
launch for each parameter, and the scalars of a train step have one each. An output that lies on its operand is updated
where it is; any other is first a copy of its operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from pipeline.ops import Kind
from pipeline.runtime.devices import TARGET
from pipeline.runtime.kernels.base import Attrs, Ins, Kernel, Launch, Outs, in_turn
from pipeline.runtime.kernels.cuda import has_triton, launch_adam
from pipeline.runtime.kernels.native.kernel_library import (
    NativeKernel,
    NativeLibrary,
    are_floats,
    is_dense_like,
    is_for_one_thread,
)

FUSED: Any = torch

Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor, and the tensor that it copies."""


def sgd(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    """Moments begin at zero, which is what torch begins with where the dampening is 0."""
    *operands, rate, skip = ins
    params, *moments = group_tensors(outs, attrs["count"])
    gradients, copies = prepare_update(operands, outs, attrs["count"])
    rate, convert = _rate_for_kernel(rate)
    update = partial(
        FUSED._fused_sgd_,
        params,
        gradients,
        moments[0] if moments else [],
        weight_decay=attrs["weight_decay"],
        momentum=attrs["momentum"],
        lr=rate,
        dampening=0.0,
        nesterov=attrs["nesterov"],
        maximize=attrs["maximize"],
        is_first_step=False,
        found_inf=skip,
    )
    return _after([*copies, *convert], update)


def adam(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    *operands, step, rate, skip = ins
    count = attrs["count"]
    params, first, second, *largest = group_tensors(outs, count)
    gradients, copies = prepare_update(operands, outs, count)
    if step.is_cuda and has_triton():
        launch = launch_adam((params, first, second, *largest), gradients, step, rate, skip, attrs)
        if launch is not None:
            return _after(copies, launch)
    rate, convert = _rate_for_kernel(rate)
    update = partial(
        FUSED._fused_adamw_ if attrs["decoupled"] else FUSED._fused_adam_,
        params,
        gradients,
        first,
        second,
        largest[0] if largest else [],
        [step] * count,
        lr=rate,
        beta1=attrs["beta1"],
        beta2=attrs["beta2"],
        weight_decay=attrs["weight_decay"],
        eps=attrs["epsilon"],
        amsgrad=bool(largest),
        maximize=attrs["maximize"],
        found_inf=skip,
    )
    return _after([*copies, *convert], update)


def _rate_for_kernel(rate: torch.Tensor) -> tuple[torch.Tensor, list[Pair]]:
    """The learning rate as the fused kernels read it, and what has to be copied before each update.

    Kernels on a device read a float32, those of the CPU any float.
    """
    if TARGET.get().is_host or rate.dtype is torch.float32:
        return rate, []
    narrow = torch.empty_like(rate, dtype=torch.float32)
    return narrow, [(narrow, rate)]


def not_finite(ins: Ins, outs: Outs, _: Attrs) -> Launch:
    """1 for an infinite number or NaN, else 0: x - x is 0 for a finite x, and else NaN, which differs from itself."""
    x = ins[0].reshape(())
    difference = torch.empty_like(x)
    return in_turn(partial(torch.sub, x, x, out=difference), partial(torch.ne, difference, difference, out=outs[0]))


def count_step(ins: Ins, outs: Outs, _: Attrs) -> Launch:
    """step + 1 - skip."""
    (step, skip), out = ins, outs[0]
    return in_turn(partial(torch.add, step, torch.ones_like(step), out=out), partial(torch.sub, out, skip, out=out))


def group_tensors(tensors: Sequence[torch.Tensor], count: int) -> list[list[torch.Tensor]]:
    return [list(tensors[at : at + count]) for at in range(0, len(tensors), count)]


def prepare_update(operands: Ins, outs: Outs, count: int) -> tuple[list[torch.Tensor], list[Pair]]:
    """The gradients, row after row as torch's kernels read them, and what has to be copied before each update."""
    copies = [
        (out, old)
        for out, old in zip(outs, [*operands[:count], *operands[2 * count :]], strict=True)
        if out.data_ptr() != old.data_ptr()
    ]
    gradients = []
    for gradient in operands[count : 2 * count]:
        in_rows = gradient if gradient.is_contiguous() else torch.empty_like(gradient, memory_format=ROWS)
        gradients.append(in_rows)
        if in_rows is not gradient:
            copies.append((in_rows, gradient))
    return gradients, copies


def _after(copies: Sequence[Pair], update: Launch) -> Launch:
    return in_turn(*(partial(target.copy_, source) for target, source in copies), update)


def launch_native_adam(library: NativeLibrary, ins: Ins, outs: Outs, attrs: Attrs) -> Launch | None:
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
    factors = [float(attrs[name]) for name in ("beta1", "beta2", "epsilon", "weight_decay")]
    kinds = (decay, int(attrs["maximize"]), int(len(groups) == 4))
    updates = [
        library.launch("adam", written, [gradient, step, rate, skip], (gradient.numel(), *factors, *kinds))
        for gradient, *written in zip(gradients, *groups, strict=True)
    ]
    return in_turn(*(partial(target.copy_, source) for target, source in copies), *updates)


def launch_not_finite(library: NativeLibrary, ins: Ins, outs: Outs, _: Attrs) -> Launch | None:
    return library.launch("is_not_finite", outs, ins, ()) if are_floats(*ins, *outs) else None


def launch_count_step(library: NativeLibrary, ins: Ins, outs: Outs, _: Attrs) -> Launch | None:
    return library.launch("count_step", outs, ins, ()) if are_floats(*ins, *outs) else None


ROWS = torch.contiguous_format

KERNELS: dict[Kind, Kernel] = {Kind.SGD: sgd, Kind.Adam: adam, Kind.NotFinite: not_finite, Kind.CountStep: count_step}

NATIVE: dict[Kind, NativeKernel] = {
    Kind.Adam: launch_native_adam,
    Kind.NotFinite: launch_not_finite,
    Kind.CountStep: launch_count_step,
}
