"""Example inputs of the two graphs, on meta for a weight-free export or on a real device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.errors import UsageError
from pipeline.export.static_cache.masks import causal_mask
from pipeline.export.static_cache.wrappers import Prefill
from pipeline.importers.from_torch.modules import as_exporting

__all__ = ["CacheSizes", "CacheSpec", "cache_specs", "decode_inputs", "prefill_inputs"]


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Tokens that prefill takes at once, and tokens that the caches of decode hold.

    Raises:
        UsageError: the caches have no room for a prompt and one token more.
    """

    prefill_len: int = 128
    max_cache_len: int = 2048

    def __post_init__(self) -> None:
        if not 0 < self.prefill_len < self.max_cache_len:
            raise UsageError(
                f"prefill of {self.prefill_len} tokens with caches of {self.max_cache_len}; expected 0 < prefill_len < "
                "max_cache_len, so that the prompt and one more token fit"
            )


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One cache tensor without its length: (1, heads, length, width). K and V may differ, and so may layers."""

    heads: int
    width: int
    dtype: torch.dtype

    @staticmethod
    def of(shape: Sequence[int], dtype: torch.dtype) -> CacheSpec:
        """The spec of a tensor (1, heads, any length, width), such as one that prefill returns."""
        return CacheSpec(shape[1], shape[3], dtype)

    def zeros(self, length: int, device: torch.device | str) -> Tensor:
        """(1, heads, length, width), as the cache is before the first token."""
        return torch.zeros(1, self.heads, length, self.width, dtype=self.dtype, device=device)


def cache_specs(model: nn.Module) -> tuple[CacheSpec, ...]:
    """The specs of k0, v0, k1, v1, …, from one call of the model with one token, on its own device."""
    device = next(model.parameters()).device
    with torch.no_grad(), as_exporting():  # some operators that experts use otherwise take one dtype only on meta
        _, *states = Prefill(model)(*_prompt(1, device))
    return tuple(CacheSpec.of(state.shape, state.dtype) for state in states)


def prefill_inputs(sizes: CacheSizes, device: torch.device | str = "meta") -> tuple[Tensor, ...]:
    """input_ids, attention_mask and position_ids of `Prefill`: tokens 0 at positions 0, 1, …"""
    return _prompt(sizes.prefill_len, device)


def decode_inputs(
    caches: Sequence[CacheSpec], sizes: CacheSizes, device: torch.device | str = "meta"
) -> tuple[Tensor, ...]:
    """The inputs of `Decode`: token 0 at the position after the prompt, and empty caches."""
    position = torch.full((1,), sizes.prefill_len, device=device)
    fixed = (
        torch.zeros(1, 1, dtype=torch.int64, device=device),
        causal_mask(position, sizes.max_cache_len),
        position.unsqueeze(0),
        position,
    )
    return (*fixed, *(cache.zeros(sizes.max_cache_len, device) for cache in caches))


def _prompt(length: int, device: torch.device | str) -> tuple[Tensor, ...]:
    positions = torch.arange(length, device=device)
    ids = torch.zeros(1, length, dtype=torch.int64, device=device)
    return ids, causal_mask(positions, length), positions.unsqueeze(0)
