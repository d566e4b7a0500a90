"""A feed-forward block that calls an operator of its own in torch, `acme::swish_beta`."""

from __future__ import annotations

import torch
from torch import Tensor, library, nn


@library.custom_op("acme::swish_beta", mutates_args=())
def swish_beta(x: Tensor, beta: float) -> Tensor:
    return x * torch.sigmoid(beta * x)


@swish_beta.register_fake
def _(x: Tensor, beta: float) -> Tensor:
    del beta
    return torch.empty_like(x)


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(swish_beta(self.up(x), 1.5))


def make(width: int = 16) -> tuple[nn.Module, tuple[Tensor]]:
    """The module, and the arguments of a call."""
    return FeedForward(width).eval(), (torch.randn(2, 5, width),)
