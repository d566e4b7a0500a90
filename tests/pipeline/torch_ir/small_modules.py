"""Small models: the three of seed document 001, and some that write, nest, and tie; `Does` is a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class MaskedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mask = torch.tensor([1.0, 0.0, 1.0, 0.0])

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.mask


class GatherWithIndex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.indices = torch.tensor([0, 2, 4, 6], dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        return out[:, self.indices]


class BufferVsConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor([2.0, 2.0, 2.0, 2.0]))
        self.offset = torch.tensor([0.1, 0.2, 0.3, 0.4])

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale + self.offset


class Cache(nn.Module):
    """Writes a row of its buffer at each call, and gives back trees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("rows", torch.zeros(4, 3))

    def forward(self, at: Tensor, batch: dict[str, Tensor], *, scale: float = 2.0) -> dict[str, Any]:
        self.rows.index_copy_(0, at, self.linear(batch["x"]))
        return {"sum": self.rows.sum() * scale, "more": (None, self.rows.clone()), "scale": scale}


def cache_call(at: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.tensor([at]), {"x": torch.full((1, 3), float(at + 1))}), {"scale": 2.0}


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


class Does(nn.Module):
    """A model whose forward is `function`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class Holds(nn.Module):
    """Reads the memory of a buffer or a constant in the order in which it lies."""

    def __init__(self, held: Tensor, *, buffer: bool) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("held", held)
        else:
            self.held = held

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_strided(self.held, (4,), (1,)) * x
