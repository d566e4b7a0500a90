"""Normalisations and softmaxes. The normalisations have no out= form: they compute into scratch and write last."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional

from pipeline.lowering import Kind
from pipeline.runtime.kernels.base import Attrs, Ins, Kernel, Launch, Outs, each_time

__all__ = ["KERNELS"]


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
    Kind.LayerNormalization: layer_norm,
    Kind.RMSNormalization: each_time(rms_norm),
    Kind.BatchNormalization: each_time(batch_norm),
    Kind.InstanceNormalization: each_time(instance_norm),
    Kind.GroupNormalization: each_time(group_norm),
    Kind.Softmax: softmax,
    Kind.LogSoftmax: log_softmax,
}
