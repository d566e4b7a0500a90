"""Normalisations and softmaxes. The normalisations have no out= form: they compute into scratch and write last."""

from __future__ import annotations

import torch
from torch.nn import functional

from pipeline.lowering import Kind
from pipeline.runtime.kernels.base import Attrs, Ins, Kernel, Outs

__all__ = ["KERNELS"]

aten = torch.ops.aten


def layer_norm(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    over = ins[0].shape[attrs["axis"] :]
    weights = [weight.expand(over) for weight in ins[1:]]
    bias = weights[1] if len(weights) == 2 else None
    outs[0].copy_(functional.layer_norm(ins[0], over, weights[0], bias, attrs["epsilon"]))


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


def softmax(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    aten._softmax.out(ins[0], attrs["axis"], False, out=outs[0])


def log_softmax(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    aten._log_softmax.out(ins[0], attrs["axis"], False, out=outs[0])


KERNELS: dict[Kind, Kernel] = {
    Kind.LayerNormalization: layer_norm,
    Kind.RMSNormalization: rms_norm,
    Kind.BatchNormalization: batch_norm,
    Kind.InstanceNormalization: instance_norm,
    Kind.GroupNormalization: group_norm,
    Kind.Softmax: softmax,
    Kind.LogSoftmax: log_softmax,
}
