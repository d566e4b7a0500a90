"""Small models by hand, each beside the module of torch that has the same layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeline.authoring import (
    GELU,
    SGD,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Embedding,
    Flatten,
    LayerNorm,
    Linear,
    MaxPool2d,
    Model,
    Module,
    MSELoss,
    ReLU,
    Sequential,
    Sigmoid,
    SiLU,
    Softmax,
    Tanh,
)
from pipeline.ir import TensorSpec

X, Y = torch.ones(8, 16), torch.ones(8, 4)


def small() -> Model:
    return Model((8, 16)).add(Linear(16, 4))


def compiled() -> Model:
    return small().compile(SGD(lr=0.1), MSELoss(), quiet=True)


@dataclass(frozen=True)
class Twin:
    """The layers, those of torch, and the input of a batch."""

    layers: tuple[tuple[type[Module], tuple[Any, ...]], ...]
    spec: TensorSpec

    def make(self) -> Sequential:
        torch.manual_seed(0)
        return Sequential(*(kind(*args) for kind, args in self.layers))

    def make_torch(self) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(getattr(nn, kind.__name__)(*args) for kind, args in self.layers))

    def batch(self, number: int = 0) -> torch.Tensor:
        draw = torch.Generator().manual_seed(number)
        if self.spec.dtype == "int64":
            return torch.randint(0, 20, self.spec.sizes, generator=draw)
        return torch.randn(self.spec.sizes, generator=draw)


MLP = Twin(
    ((Linear, (16, 32)), (ReLU, ()), (Linear, (32, 32)), (GELU, ("tanh",)), (Linear, (32, 10))),
    TensorSpec((8, 16), "float32"),
)

TWINS = {
    "mlp": MLP,
    "cnn": Twin(
        (
            (Conv2d, (1, 8, 3, 1, 1, 1, 1, False)),
            (BatchNorm2d, (8,)),
            (ReLU, ()),
            (MaxPool2d, (2,)),
            (Flatten, ()),
            (Linear, (128, 10)),
        ),
        TensorSpec((8, 1, 8, 8), "float32"),
    ),
    "strided, grouped": Twin(
        ((Conv2d, (4, 8, (3, 5), 2, (1, 2), 1, 2)), (SiLU, ()), (MaxPool2d, (3, 2, 1)), (Flatten, (2,))),
        TensorSpec((2, 4, 9, 11), "float32"),
    ),
    "text": Twin(
        ((Embedding, (20, 16)), (LayerNorm, (16,)), (Linear, (16, 24)), (GELU, ()), (Linear, (24, 20, False))),
        TensorSpec((4, 7), "int64"),
    ),
    "squashed": Twin(
        ((Tanh, ()), (LayerNorm, ((4, 6), 1e-3)), (Sigmoid, ()), (Softmax, (1,)), (Dropout, (0.5,))),
        TensorSpec((3, 4, 6), "float32"),
    ),
}


def classes_of(number: int, count: int = 8) -> torch.Tensor:
    return torch.randint(0, 10, (count,), generator=torch.Generator().manual_seed(1000 + number))


def batches_of(twin: Twin, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(twin.batch(number), classes_of(number)) for number in range(count)]
