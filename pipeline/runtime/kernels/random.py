"""Kernels that draw numbers, each launch from a new generator with the op's seed, so that runs repeat.

A replay must not repeat: its steps have a further attribute `generator`, which goes on from launch to launch.
onnxruntime and torch draw other numbers for the same seed: each has another generator.
"""

from __future__ import annotations

import torch

from pipeline.ops import Kind
from pipeline.runtime.kernels.base import Attrs, Ins, Kernel, Outs, each_time


def normal(_: Ins, outs: Outs, attrs: Attrs) -> None:
    outs[0].normal_(attrs["mean"], attrs["scale"], generator=_generator(attrs))


def uniform(_: Ins, outs: Outs, attrs: Attrs) -> None:
    """At least `low` and below `high`. Drawn between 0 and 1: torch refuses ranges that a small dtype cannot span."""
    drawn = torch.rand(outs[0].shape, generator=_generator(attrs), dtype=torch.float64)
    outs[0].copy_(attrs["low"] + (attrs["high"] - attrs["low"]) * drawn)


def bernoulli(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    outs[0].copy_(torch.bernoulli(ins[0], generator=_generator(attrs)))


def multinomial(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    """ONNX gives log-probabilities, which need not sum up to one; it draws with replacement."""
    shares = torch.softmax(ins[0].double(), dim=1)
    outs[0].copy_(torch.multinomial(shares, outs[0].shape[1], replacement=True, generator=_generator(attrs)))


def dropout(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    """Kept elements are scaled up, so that the mean stays."""
    kept = torch.rand(ins[0].shape, generator=_generator(attrs), dtype=torch.float64) >= attrs["ratio"]
    outs[0].copy_(torch.where(kept, ins[0] / (1 - attrs["ratio"]), 0))
    outs[1].copy_(kept)


def _generator(attrs: Attrs) -> torch.Generator:
    return attrs.get("generator") or torch.Generator().manual_seed(attrs["seed"])


KERNELS: dict[Kind, Kernel] = {
    Kind.RandomNormal: each_time(normal),
    Kind.RandomUniform: each_time(uniform),
    Kind.Bernoulli: each_time(bernoulli),
    Kind.Multinomial: each_time(multinomial),
    Kind.Dropout: each_time(dropout),
}
