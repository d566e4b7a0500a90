"""A plain attention block: three projections apart, no mask. `configs/attention_block.yaml` runs it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class AttentionBlock(nn.Module):
    """Multi-head self-attention with a Linear layer each for Q, K and V."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._split(layer(x)) for layer in (self.query, self.key, self.value))
        scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[3])
        context = torch.softmax(scores, dim=3) @ value
        return self.out(context.transpose(1, 2).reshape(x.shape))

    def _split(self, x: Tensor) -> Tensor:
        """(batch, places, hidden) → (batch, heads, places, hidden / heads)."""
        batch, places, hidden = x.shape
        return x.reshape(batch, places, self.heads, hidden // self.heads).transpose(1, 2)


def make(hidden: int = 768, heads: int = 12, places: int = 16) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The block with random weights, and an example to call it with."""
    return AttentionBlock(hidden, heads), (torch.rand(2, places, hidden) * 2 - 1,)
