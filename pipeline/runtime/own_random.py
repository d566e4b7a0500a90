"""ONNX's operators that draw numbers. Called as operators of torch they draw torch's own (`torch.manual_seed`), so that
no two steps of a training draw the same; a plan gives each a generator with the seed of its node.

Onnxruntime draws other numbers for the same seed: it has another generator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from pipeline.runtime.tensors import torch_dtype


def random_normal(
    size: Sequence[int], mean: float, scale: float, dtype: str, seed: int, generator: torch.Generator | None = None
) -> torch.Tensor:
    del seed
    wide = torch.float64 if dtype == "float64" else torch.float32
    return (mean + scale * torch.randn(size, generator=generator, dtype=wide)).to(torch_dtype(dtype))


def random_uniform(
    size: Sequence[int], low: float, high: float, dtype: str, seed: int, generator: torch.Generator | None = None
) -> torch.Tensor:
    """At least `low` and below `high`. Drawn between 0 and 1: torch refuses ranges that a small dtype cannot span."""
    del seed
    return (low + (high - low) * torch.rand(size, generator=generator, dtype=torch.float64)).to(torch_dtype(dtype))


def bernoulli(self: torch.Tensor, dtype: str, seed: int, generator: torch.Generator | None = None) -> torch.Tensor:
    del seed
    return torch.bernoulli(self.detach(), generator=generator).to(torch_dtype(dtype))


def multinomial(
    self: torch.Tensor, count: int, dtype: str, seed: int, generator: torch.Generator | None = None
) -> torch.Tensor:
    """ONNX gives log-probabilities, which need not sum up to one; it draws with replacement."""
    del seed
    shares = torch.softmax(self.detach().double(), 1)
    return torch.multinomial(shares, count, replacement=True, generator=generator).to(torch_dtype(dtype))


def dropout(
    self: torch.Tensor, ratio: float, seed: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the mask of what was kept: this is scaled up, so that the mean stays."""
    del seed
    if generator is None:
        return torch.native_dropout(self, ratio, True)
    kept = torch.rand(self.shape, generator=generator, dtype=torch.float64) >= ratio
    return torch.where(kept, self / (1 - ratio), 0), kept


DRAWS: Final[Mapping[str, Callable[..., Any]]] = {
    "random_normal(SymInt[] size, float mean, float scale, str dtype, int seed) -> Tensor": random_normal,
    "random_uniform(SymInt[] size, float low, float high, str dtype, int seed) -> Tensor": random_uniform,
    "bernoulli(Tensor self, str dtype, int seed) -> Tensor": bernoulli,
    "multinomial(Tensor self, SymInt count, str dtype, int seed) -> Tensor": multinomial,
    "dropout(Tensor self, float ratio, int seed) -> (Tensor, Tensor)": dropout,
}
"""The function of each, by the schema of its operator."""
