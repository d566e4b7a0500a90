"""A decoder of eight plain layers that keeps its keys and values in buffers, eight heads of 128 by 2048 places."""

from __future__ import annotations

import torch
from torch import nn

HEADS, WIDTH, CACHED, LAYERS, WORDS = 8, 128, 2048, 8, 1000


class Layer(nn.Module):
    """Attention over all that is cached, then a feed-forward part."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * WIDTH
        self.before_attention, self.before_growth = nn.RMSNorm(width), nn.RMSNorm(width)
        self.project, self.join = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.grow, self.shrink = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, HEADS, CACHED, WIDTH))

    def forward(self, x: torch.Tensor, at: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """`x` float32[1, 1, heads * width], the token at place `at`; `seen` says which places count."""
        parts = self.project(self.before_attention(x)).view(1, 1, 3, HEADS, WIDTH)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        self.keys.index_copy_(2, at, key)
        self.values.index_copy_(2, at, value)
        found = nn.functional.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=seen)
        x = x + self.join(found.transpose(1, 2).reshape(1, 1, HEADS * WIDTH))
        return x + self.shrink(nn.functional.silu(self.grow(self.before_growth(x))))


class Decoder(nn.Module):
    """Logits of the next token for the token at one place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, HEADS * WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(HEADS * WIDTH, WORDS, bias=False)

    def forward(self, token: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """`token` int64[1, 1], `at` int64[1]."""
        x, seen = self.embed(token), (torch.arange(CACHED) <= at)[None, None, None]
        for layer in self.layers:
            x = layer(x, at, seen)
        return self.head(x)
