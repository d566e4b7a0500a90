"""Kernels that compute along axes: reductions, the running sum, softmaxes and normalisations.

The normalisations have no out= form: they compute into scratch and write last.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional

from pipeline.ops import Kind
from pipeline.runtime.kernels.base import Attrs, Ins, Kernel, Launch, Outs, each_time


def reduce_sum(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    # Without dtype= torch sums small integers in int64.
    return partial(torch.sum, ins[0], dim=attrs["axes"], keepdim=attrs["keepdims"], dtype=outs[0].dtype, out=outs[0])


def reduce_mean(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    if ins[0].is_floating_point():
        return partial(torch.mean, ins[0], dim=attrs["axes"], keepdim=attrs["keepdims"], out=outs[0])
    return partial(_mean_of_integers, ins, outs, attrs)


def _mean_of_integers(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    outs[0].copy_(torch.mean(ins[0], dim=attrs["axes"], keepdim=attrs["keepdims"], dtype=torch.float64))


def reduce_max(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    return partial(torch.amax, ins[0], dim=attrs["axes"], keepdim=attrs["keepdims"], out=outs[0])


def reduce_min(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    return partial(torch.amin, ins[0], dim=attrs["axes"], keepdim=attrs["keepdims"], out=outs[0])


def reduce_prod(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    """Torch multiplies along one dimension at a time."""
    x = ins[0]
    for axis in attrs["axes"]:
        x = torch.prod(x, dim=axis, keepdim=True, dtype=outs[0].dtype)
    outs[0].copy_(x.reshape(outs[0].shape))


def reduce_l2(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    if ins[0].is_floating_point():
        torch.linalg.vector_norm(ins[0], 2, dim=attrs["axes"], keepdim=attrs["keepdims"], out=outs[0])
    else:
        norm = torch.linalg.vector_norm(ins[0].double(), 2, dim=attrs["axes"], keepdim=attrs["keepdims"])
        outs[0].copy_(norm)


def reduce_log_sum_exp(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    return partial(torch.logsumexp, ins[0], dim=attrs["axes"], keepdim=attrs["keepdims"], out=outs[0])


def arg_max(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    """Torch's CPU kernel gives the first of equal values, as ONNX asks."""
    return partial(torch.argmax, ins[0], dim=attrs["axis"], keepdim=attrs["keepdims"], out=outs[0])


def arg_min(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    return partial(torch.argmin, ins[0], dim=attrs["axis"], keepdim=attrs["keepdims"], out=outs[0])


def cum_sum(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    """`exclusive` leaves the element itself out of its sum; `reverse` sums from the end."""
    x, out, axis = ins[0], outs[0], attrs["axis"]
    if attrs["reverse"]:
        x = x.flip(axis)
    total = torch.cumsum(x, axis, dtype=out.dtype)
    if attrs["exclusive"] and x.shape[axis]:
        zero = torch.zeros_like(total.narrow(axis, 0, 1))
        total = torch.cat([zero, total.narrow(axis, 0, x.shape[axis] - 1)], axis)
    out.copy_(total.flip(axis) if attrs["reverse"] else total)


def layer_norm(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    over = ins[0].shape[attrs["axis"] :]
    weights = [weight.expand(over) for weight in ins[1:]]
    bias = weights[1] if len(weights) == 2 else None
    return partial(_layer_norm_into, outs[0], ins[0], over, weights[0], bias, attrs["epsilon"])


def _layer_norm_into(out: torch.Tensor, *args: Any) -> None:
    out.copy_(torch.native_layer_norm(*args)[0])


def rms_norm(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    over = ins[0].shape[attrs["axis"] :]
    outs[0].copy_(functional.rms_norm(ins[0], over, ins[1].expand(over), attrs["epsilon"]))


def batch_norm(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    x, scale, bias, mean, variance = ins
    outs[0].copy_(functional.batch_norm(x, mean, variance, scale, bias, eps=attrs["epsilon"]))


def instance_norm(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    """One group per channel; torch's own instance_norm refuses a single spatial element."""
    outs[0].copy_(torch.group_norm(ins[0], ins[0].shape[1], ins[1], ins[2], attrs["epsilon"]))


def group_norm(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    outs[0].copy_(torch.group_norm(ins[0], attrs["groups"], ins[1], ins[2], attrs["epsilon"]))


def softmax(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    return partial(torch.softmax, ins[0], attrs["axis"], out=outs[0])


def log_softmax(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    return partial(torch.log_softmax, ins[0], attrs["axis"], out=outs[0])


KERNELS: dict[Kind, Kernel] = {
    Kind.ReduceSum: reduce_sum,
    Kind.ReduceMean: reduce_mean,
    Kind.ReduceMax: reduce_max,
    Kind.ReduceMin: reduce_min,
    Kind.ReduceProd: each_time(reduce_prod),
    Kind.ReduceL2: each_time(reduce_l2),
    Kind.ReduceLogSumExp: reduce_log_sum_exp,
    Kind.ArgMax: arg_max,
    Kind.ArgMin: arg_min,
    Kind.CumSum: each_time(cum_sum),
    Kind.LayerNormalization: layer_norm,
    Kind.RMSNormalization: each_time(rms_norm),
    Kind.BatchNormalization: each_time(batch_norm),
    Kind.InstanceNormalization: each_time(instance_norm),
    Kind.GroupNormalization: each_time(group_norm),
    Kind.Softmax: softmax,
    Kind.LogSoftmax: log_softmax,
}
