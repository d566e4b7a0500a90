"""Modules that cost little to make: a parameter and a function, no initial values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Place:
    """Where parameters are made. Said to each of them: `with torch.device(...)` would cost more than making them."""

    device: str
    dtype: torch.dtype


class Weight(nn.Module):
    """One parameter called `weight`, uninitialized. A large model has 70,000 of these, which nn.Linear would fill."""

    def __init__(self, *shape: int, place: Place) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=place.dtype, device=place.device), requires_grad=False)


class Linear(Weight):
    """(…, inputs) → (…, outputs), without a bias; the weight is (outputs, inputs)."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class Embedding(Weight):
    """Token ids (…) → (…, hidden)."""

    def forward(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight)


class RMSNorm(Weight):
    """x / √(mean of x² + eps) · weight over the last dim; the mean is taken in float32."""

    def __init__(self, width: int, eps: float, place: Place) -> None:
        super().__init__(width, place=place)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Mlp(nn.Module):
    """down(silu(gate(x)) · up(x)): a dense layer's, the shared expert, and the shape of each routed one."""

    def __init__(self, hidden: int, inner: int, place: Place) -> None:
        super().__init__()
        self.gate_proj = Linear(inner, hidden, place=place)
        self.up_proj = Linear(inner, hidden, place=place)
        self.down_proj = Linear(hidden, inner, place=place)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
