"""Small torch models for whole runs. Read by path, as a user's file would be."""

from __future__ import annotations

import torch
from torch import nn


class Attention(nn.Module):
    """One attention block with separate projections, as `nn.Linear` makes them."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        weights = torch.softmax(q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5, -1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Root(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(x)


class Baked(nn.Module):
    """Computes another thing when it is exported than when torch runs it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 if torch.compiler.is_exporting() else 2.0)


def attention(width: int = 32) -> nn.Module:
    return Attention(width)


def circular_attention() -> nn.Module:
    """A module that holds itself, so that only Python's collector frees it."""
    module = Attention()
    module.whole = (module,)  # type: ignore[assignment]
    return module


def attention_with_example() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Attention(), (torch.linspace(-1, 1, 4 * 8 * 32).reshape(4, 8, 32),)


def half() -> nn.Module:
    return Attention().bfloat16()


def root() -> nn.Module:
    return Root()


def baked() -> nn.Module:
    return Baked()


def broken() -> nn.Module:
    raise RuntimeError("no weights today")


class Modulated(nn.Module):
    """As in a DiT: chunks of one projection scale and shift, which torch exports as a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.modulate = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, shift, gate = self.modulate(x).chunk(3, dim=-1)
        return x + gate * (x * (1 + scale) + shift)


def modulated() -> nn.Module:
    return Modulated()


class Picky(nn.Module):
    """Takes no negative numbers, as a tokenizer's ids are none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting() and (x == -1).all():
            raise ValueError("no negative numbers")
        return x + 1


def picky() -> nn.Module:
    return Picky()
