"""Forms that draw numbers. They draw torch's own (`torch.manual_seed`), so no two steps of a training draw the same."""

from __future__ import annotations

import torch

from pipeline.ops import Kind
from pipeline.runtime.functional.base import Attrs, Form, Ins, Specs
from pipeline.runtime.tensors import torch_dtype


def normal(_: Ins, attrs: Attrs, outs: Specs) -> torch.Tensor:
    drawn = torch.randn(outs[0].sizes, dtype=torch.float32)
    return (attrs["mean"] + attrs["scale"] * drawn).to(torch_dtype(outs[0].dtype))


def uniform(_: Ins, attrs: Attrs, outs: Specs) -> torch.Tensor:
    """Between 0 and 1 first: torch refuses ranges that a small dtype cannot span."""
    drawn = torch.rand(outs[0].sizes, dtype=torch.float64)
    return (attrs["low"] + (attrs["high"] - attrs["low"]) * drawn).to(torch_dtype(outs[0].dtype))


def bernoulli(ins: Ins, _: Attrs, outs: Specs) -> torch.Tensor:
    return torch.bernoulli(ins[0].detach()).to(torch_dtype(outs[0].dtype))


def multinomial(ins: Ins, _: Attrs, outs: Specs) -> torch.Tensor:
    """ONNX gives log-probabilities, and draws with replacement."""
    shares = torch.softmax(ins[0].detach().double(), 1)
    return torch.multinomial(shares, outs[0].sizes[1], replacement=True).to(torch_dtype(outs[0].dtype))


def dropout(ins: Ins, attrs: Attrs, outs: Specs) -> tuple[torch.Tensor, torch.Tensor]:
    result, kept = torch.native_dropout(ins[0], attrs["ratio"], True)
    return result, kept.to(torch_dtype(outs[1].dtype))


FORMS: dict[Kind, Form] = {
    Kind.RandomNormal: normal,
    Kind.RandomUniform: uniform,
    Kind.Bernoulli: bernoulli,
    Kind.Multinomial: multinomial,
    Kind.Dropout: dropout,
}
