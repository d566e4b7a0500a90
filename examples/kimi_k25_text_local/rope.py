"""Rotary positions with yarn, as DeepSeek-V3 defines them. Source: the YaRN paper, arXiv 2309.00071."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kimi_k25_text_local.config import KimiTextConfig


def cos_and_sin(config: KimiTextConfig, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Of each position and frequency, (1, 1, length, qk_rope_head_dim / 2), in the model's dtype.

    The frequencies are computed in the graph: a buffer would be empty on meta, and in no checkpoint.
    """
    angles = position_ids[:, None, :, None].float() * _frequencies(config, position_ids.device)
    yarn = config.yarn
    scale = _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)
    return (angles.cos() * scale).to(config.dtype), (angles.sin() * scale).to(config.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x0, x1), (x2, x3), … of the last dim; the first of all pairs come out before the second."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)


def softmax_scale(config: KimiTextConfig) -> float:
    """1 / √width, and yarn's correction of the attention's temperature, once for queries and once for keys."""
    return config.qk_head_dim**-0.5 * _mscale(config.yarn.factor, config.yarn.mscale_all_dim) ** 2


def _frequencies(config: KimiTextConfig, device: torch.device) -> Tensor:
    """Fast ones as they are, slow ones divided by `factor`, a ramp between, (qk_rope_head_dim / 2,)."""
    dim = config.qk_rope_head_dim
    plain = config.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    low, high = _ramp(config)
    slow = ((torch.arange(dim // 2, dtype=torch.float32, device=device) - low) / (high - low)).clamp(0, 1)
    return plain * (1 - slow) + plain / config.yarn.factor * slow


def _ramp(config: KimiTextConfig) -> tuple[float, float]:
    """The first and the last frequency of the ramp: those that turn `beta_fast` and `beta_slow` times in training."""
    low = math.floor(_frequency_of(config.yarn.beta_fast, config))
    high = math.ceil(_frequency_of(config.yarn.beta_slow, config))
    low, high = max(low, 0), min(high, config.qk_rope_head_dim - 1)
    return low, high if low != high else high + 0.001


def _frequency_of(turns: float, config: KimiTextConfig) -> float:
    span = config.yarn.original_max_position_embeddings / (turns * 2 * math.pi)
    return config.qk_rope_head_dim * math.log(span) / (2 * math.log(config.rope_theta))


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
