"""The attention block of examples/, with three projections or with one for all."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from examples.attention_block import AttentionBlock


def make_block(hidden: int, heads: int) -> AttentionBlock:
    """Seeded weights: V is a tenth of Q and K, so that a scale for all three costs V its bits."""
    torch.manual_seed(0)
    block = AttentionBlock(hidden, heads).eval()
    with torch.no_grad():
        for layer, size in ((block.query, 2.0), (block.key, 2.0), (block.value, 0.2)):
            layer.weight.mul_(size)
            layer.bias.normal_().mul_(size)
    return block


class FusedBlock(nn.Module):
    """The same numbers by torch's own attention, which is one `Attention` operator from opset 23 on."""

    def __init__(self, block: AttentionBlock) -> None:
        super().__init__()
        self.heads = block.heads
        self.query, self.key, self.value, self.out = block.query, block.key, block.value, block.out

    def forward(self, x: Tensor) -> Tensor:
        batch, places, hidden = x.shape
        layers = (self.query, self.key, self.value)
        query, key, value = (layer(x).reshape(batch, places, self.heads, -1).transpose(1, 2) for layer in layers)
        context = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.out(context.transpose(1, 2).reshape(batch, places, hidden))


class MergedBlock(nn.Module):
    """The same numbers from one Linear for Q, K and V."""

    def __init__(self, block: AttentionBlock) -> None:
        super().__init__()
        hidden = block.query.in_features
        self.heads, self.out = block.heads, block.out
        self.qkv = nn.Linear(hidden, 3 * hidden)
        layers = (block.query, block.key, block.value)
        with torch.no_grad():
            self.qkv.weight.copy_(torch.cat([layer.weight for layer in layers]))
            self.qkv.bias.copy_(torch.cat([layer.bias for layer in layers]))

    def forward(self, x: Tensor) -> Tensor:
        batch, places, hidden = x.shape
        parts = self.qkv(x).chunk(3, dim=2)
        query, key, value = (part.reshape(batch, places, self.heads, -1).transpose(1, 2) for part in parts)
        context = torch.softmax(query @ key.transpose(2, 3) / math.sqrt(query.shape[3]), dim=3) @ value
        return self.out(context.transpose(1, 2).reshape(batch, places, hidden))
