"""Forms along axes: reductions, the running sum, softmaxes and normalisations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from pipeline.ops import Kind
from pipeline.runtime.functional.base import Attrs, Form, Ins, Results, Specs
from pipeline.runtime.tensors import torch_dtype


def along(function: Callable[..., torch.Tensor]) -> Form:
    """The form of a torch function of a tensor, its axes and `keepdim`."""

    def form(ins: Ins, attrs: Attrs, _: Specs) -> torch.Tensor:
        return function(ins[0], attrs["axes"], keepdim=attrs["keepdims"])

    return form


def in_floats(function: Callable[..., torch.Tensor]) -> Form:
    """`along`, for a function that takes no integers; these pass through float64."""

    def form(ins: Ins, attrs: Attrs, outs: Specs) -> Results:
        if ins[0].is_floating_point():
            return along(function)(ins, attrs, outs)
        return function(ins[0].double(), attrs["axes"], keepdim=attrs["keepdims"]).to(torch_dtype(outs[0].dtype))

    return form


def norm(x: torch.Tensor, axes: tuple[int, ...], *, keepdim: bool) -> torch.Tensor:
    return torch.linalg.vector_norm(x, 2, axes, keepdim=keepdim)


def total(ins: Ins, attrs: Attrs, outs: Specs) -> torch.Tensor:
    return ins[0].sum(attrs["axes"], keepdim=attrs["keepdims"], dtype=torch_dtype(outs[0].dtype))


def product(ins: Ins, attrs: Attrs, outs: Specs) -> torch.Tensor:
    """Torch multiplies along one axis at a time."""
    x = ins[0]
    for axis in attrs["axes"]:
        x = x.prod(axis, keepdim=True, dtype=torch_dtype(outs[0].dtype))
    return x.reshape(outs[0].sizes)


def position(function: Callable[..., torch.Tensor]) -> Form:
    def form(ins: Ins, attrs: Attrs, _: Specs) -> torch.Tensor:
        return function(ins[0], attrs["axis"], keepdim=attrs["keepdims"])

    return form


def running_sum(ins: Ins, attrs: Attrs, outs: Specs) -> torch.Tensor:
    """`exclusive` leaves the element itself out of its sum; `reverse` sums from the end."""
    x, axis = ins[0], attrs["axis"]
    x = x.flip(axis) if attrs["reverse"] else x
    if attrs["exclusive"]:
        x = torch.cat([torch.zeros_like(x.narrow(axis, 0, min(1, x.shape[axis]))), x], axis)[
            tuple(slice(size) for size in outs[0].sizes)
        ]
    found = x.cumsum(axis, dtype=torch_dtype(outs[0].dtype))
    return found.flip(axis) if attrs["reverse"] else found


def layer_norm(ins: Ins, attrs: Attrs, _: Specs) -> torch.Tensor:
    over = ins[0].shape[attrs["axis"] :]
    weight, *bias = (operand.expand(over) for operand in ins[1:])
    return functional.layer_norm(ins[0], over, weight, bias[0] if bias else None, attrs["epsilon"])


def rms_norm(ins: Ins, attrs: Attrs, _: Specs) -> torch.Tensor:
    x, scale = ins
    axes = tuple(range(attrs["axis"] % x.dim(), x.dim()))
    return x * torch.rsqrt((x * x).mean(axes, keepdim=True) + attrs["epsilon"]) * scale


def batch_norm(ins: Ins, attrs: Attrs, _: Specs) -> torch.Tensor:
    """With the stored statistics: an imported model normalises as it does at inference."""
    shape = (1, -1, *[1] * (ins[0].dim() - 2))
    scale, bias, mean, variance = (operand.view(shape) for operand in ins[1:])
    return (ins[0] - mean) * torch.rsqrt(variance + attrs["epsilon"]) * scale + bias


def instance_norm(ins: Ins, attrs: Attrs, _: Specs) -> torch.Tensor:
    return functional.group_norm(ins[0], ins[0].shape[1], ins[1], ins[2], attrs["epsilon"])


def group_norm(ins: Ins, attrs: Attrs, _: Specs) -> torch.Tensor:
    return functional.group_norm(ins[0], attrs["groups"], ins[1], ins[2], attrs["epsilon"])


FORMS: dict[Kind, Form] = {
    Kind.ReduceSum: total,
    Kind.ReduceMean: in_floats(torch.mean),
    Kind.ReduceMax: along(torch.amax),
    Kind.ReduceMin: along(torch.amin),
    Kind.ReduceProd: product,
    Kind.ReduceL2: in_floats(norm),
    Kind.ReduceLogSumExp: along(torch.logsumexp),
    Kind.ArgMax: position(torch.argmax),
    Kind.ArgMin: position(torch.argmin),
    Kind.CumSum: running_sum,
    Kind.LayerNormalization: layer_norm,
    Kind.RMSNormalization: rms_norm,
    Kind.BatchNormalization: batch_norm,
    Kind.InstanceNormalization: instance_norm,
    Kind.GroupNormalization: group_norm,
    Kind.Softmax: lambda ins, attrs, _: torch.softmax(ins[0], attrs["axis"]),
    Kind.LogSoftmax: lambda ins, attrs, _: torch.log_softmax(ins[0], attrs["axis"]),
}
