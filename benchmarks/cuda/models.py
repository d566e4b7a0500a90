"""The models of the rows, in plain torch: the machine with the card has no transformers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as f


class Block(nn.Module):
    """Attention and two products, each with its norm before (GPT-2, ViT) or after it (BERT)."""

    def __init__(self, width: int, heads: int, *, norm_first: bool, is_causal: bool = False) -> None:
        super().__init__()
        self.heads, self.norm_first, self.is_causal = heads, norm_first, is_causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        shape = (batch, tokens, self.heads, width // self.heads)
        query, key, value = (part(x).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = f.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))

    def think(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(f.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm_first:
            x = x + self.attend(self.first(x))
            return x + self.think(self.second(x))
        x = self.first(x + self.attend(x))
        return self.second(x + self.think(x))


class Words(nn.Module):
    """Words and their places through blocks: BERT, or GPT-2 with the table as its last product."""

    def __init__(self, words: int, places: int, width: int, layers: int, heads: int, *, is_causal: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(places, width)
        self.blocks = nn.Sequential(
            *(Block(width, heads, norm_first=is_causal, is_causal=is_causal) for _ in range(layers))
        )
        self.norm, self.is_causal = nn.LayerNorm(width), is_causal

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.blocks(self.words(ids) + self.places(places)))
        return f.linear(x, self.words.weight).flatten(0, 1) if self.is_causal else x


class Patches(nn.Module):
    """ViT: patches of an image, one more token, blocks."""

    def __init__(self, image: int, patch: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, norm_first=True) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.cut(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.norm(self.blocks(x))[:, 0]


class Decode(nn.Module):
    """One block of a Llama at one token: RMSNorm, RoPE, a cache that is written in place, SwiGLU."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, width: int, heads: int, inner: int, cache: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.first, self.second = (nn.Parameter(torch.ones(width)) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self.register_buffer("keys", torch.zeros(1, heads, cache, self.size))
        self.register_buffer("values", torch.zeros(1, heads, cache, self.size))

    def forward(self, x: torch.Tensor, at: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rates = 10000.0 ** -(torch.arange(0, self.size, 2, device=x.device) / self.size)
        angles = (at * rates).repeat(2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        normal = f.rms_norm(x, (x.shape[-1],), self.first, 1e-5)
        query, key, value = (
            part(normal).view(1, 1, self.heads, self.size).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        self.keys.index_copy_(2, at, turn(key, cos, sin))
        self.values.index_copy_(2, at, value)
        mixed = f.scaled_dot_product_attention(turn(query, cos, sin), self.keys, self.values, mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(1, 1, -1))
        normal = f.rms_norm(x, (x.shape[-1],), self.second, 1e-5)
        return x + self.down(f.silu(self.gate(normal)) * self.up(normal))


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE by the angles of a place."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


class Classifier(nn.Module):
    """A small transformer with a class for each sequence."""

    def __init__(self, words: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.inner = Words(words, 512, width, layers, heads, is_causal=False)
        self.head = nn.Linear(width, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(ids)[:, 0])
