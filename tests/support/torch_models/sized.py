"""Torch modules that care for the sizes of their inputs, or look rows up."""

from __future__ import annotations

import torch
from torch import nn


class Alone(nn.Module):
    """Computes something else at batch 1, which torch.export takes no batch to be."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] == 1 else x + 1


class Few(nn.Module):
    """Computes something else from batch 5 on: the export holds below."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[0] < 5 else x + 2


class Words(nn.Module):
    """A table of words, one of positions that ends at 6, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 4)
        self.positions = nn.Embedding(6, 4)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.positions.weight[: ids.shape[1]]
        return x * mask.unsqueeze(-1)


class Chunked(nn.Module):
    """Works in chunks of 4 places, as a state space does: the trace keeps how many they are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 4))
        state = torch.zeros(3)
        for chunk in x.reshape(x.shape[0] // 4, 4, 3):
            state = state * 0.5 + chunk.sum(0)
        return state


def chunked() -> nn.Module:
    return Chunked()


class Pairs(nn.Module):
    """Works on pairs of places, an odd one next to a zero; a trace at an even length drops no place of a zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = x.shape[0]
        padding = -count % 2
        x = nn.functional.pad(x, (0, 0, 0, padding)).reshape(-1, 2, 3).cumsum(1).reshape(-1, 3)
        if padding > 0:
            x = x[:count]
        return x.reshape(count, 3)


def pairs() -> nn.Module:
    return Pairs()


class Masked(nn.Module):
    """Compares the lengths of two inputs, which are one named dim."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if mask.shape[1] < ids.shape[1]:
            raise ValueError("the mask is too short")
        return ids * mask[:, : ids.shape[1]]


def masked() -> nn.Module:
    return Masked()


class Best(nn.Module):
    """The six best of equal scores."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.gather(1, torch.topk(x * 0, 6, dim=1).indices)


def best() -> nn.Module:
    return Best()


class Attends(nn.Module):
    """To what a mask leaves, as torch's own attention has it."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = x.unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, mask[:, None, None, :].bool())


def attends() -> nn.Module:
    return Attends()


def alone() -> nn.Module:
    return Alone()


def few() -> nn.Module:
    return Few()


def words() -> nn.Module:
    return Words()
