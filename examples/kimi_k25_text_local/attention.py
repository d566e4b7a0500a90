"""Multi-head latent attention, eager: queries and keys pass through narrow layers, the cache holds them widened."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kimi_k25_text_local.config import KimiTextConfig
from kimi_k25_text_local.parts import Linear, Place, RMSNorm
from kimi_k25_text_local.rope import rotate, softmax_scale

LATENT_EPS = 1e-6
"""Of the two norms inside: DeepSeek's code takes RMSNorm's default there, not the config's."""


class Attention(nn.Module):
    """
    K is (1, heads, length, nope + rope) and V (1, heads, length, v_head_dim), never the latent: a runtime needs no
    matrix product to read its cache.
    """

    def __init__(self, config: KimiTextConfig, layer: int, place: Place) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.scale = softmax_scale(config)
        heads, hidden = config.num_attention_heads, config.hidden_size
        self.q_a_proj = Linear(config.q_lora_rank, hidden, place=place)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_EPS, place)
        self.q_b_proj = Linear(heads * config.qk_head_dim, config.q_lora_rank, place=place)
        self.kv_a_proj_with_mqa = Linear(config.kv_lora_rank + config.qk_rope_head_dim, hidden, place=place)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, LATENT_EPS, place)
        self.kv_b_proj = Linear(heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank, place=place)
        self.o_proj = Linear(hidden, heads * config.v_head_dim, place=place)

    def forward(self, x: Tensor, mask: Tensor, positions: tuple[Tensor, Tensor], cache: Any) -> Tensor:
        """x is (1, length, hidden); the mask is added to the scores, which makes them float32."""
        queries = self._queries(x, positions)
        keys, values = self._keys_and_values(x, positions)
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer)
        scores = torch.matmul(queries, keys.transpose(2, 3)) * self.scale + mask
        weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype)
        return self.o_proj(torch.matmul(weights, values).transpose(1, 2).flatten(2))

    def _queries(self, x: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        config = self.config
        queries = self._heads(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))), config.qk_head_dim)
        still, turning = queries.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        return torch.cat([still, rotate(turning, *positions)], dim=-1)

    def _keys_and_values(self, x: Tensor, positions: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        config = self.config
        latent, turning = self.kv_a_proj_with_mqa(x).split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        both = self._heads(self.kv_b_proj(self.kv_a_layernorm(latent)), config.qk_nope_head_dim + config.v_head_dim)
        still, values = both.split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
        turned = rotate(turning.unsqueeze(1), *positions).expand(-1, config.num_attention_heads, -1, -1)
        return torch.cat([still, turned], dim=-1), values

    def _heads(self, x: Tensor, width: int) -> Tensor:
        """(1, length, heads · width) → (1, heads, length, width)."""
        return x.view(x.shape[0], x.shape[1], self.config.num_attention_heads, width).transpose(1, 2)
