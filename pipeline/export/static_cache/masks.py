"""Additive causal masks: 0 where a query may look, the lowest float32 elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LOWEST = torch.finfo(torch.float32).min

FULL, SLIDING = "full_attention", "sliding_attention"


def causal_mask(query_positions: Tensor, key_length: int) -> Tensor:
    """The mask that both graphs take, float32 (1, 1, queries, keys), on the device of the positions.

    Args:
        query_positions: int64 (queries,), the position of each query in the sequence.

    Source: seed document 000, `make_additive_causal_mask`.
    """
    keys = torch.arange(key_length, device=query_positions.device)
    hidden = keys.unsqueeze(0) > query_positions.unsqueeze(1)
    # Filled, not multiplied: 0 × lowest is fine, but hidden × lowest on meta would keep the dtype of `hidden`.
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, LOWEST)[None, None]


def mask_for_model(mask: Tensor, position_ids: Tensor, model: Any) -> Tensor | dict[str, Tensor]:
    """The mask for this model's attention: in its dtype, and with its sliding window if it has one.

    transformers takes a mask of four dims as it is and adds no window to it, so the window is added here; a model
    with layers of both kinds takes a mapping by kind.
    """
    kinds = attention_kinds(model)
    mask = _cast(mask, model)
    if SLIDING not in kinds:
        return mask
    windowed = _add_window(mask, position_ids, _text_config(model).sliding_window)
    return windowed if FULL not in kinds else {FULL: mask, SLIDING: windowed}


def attention_kinds(model: Any) -> frozenset[str]:
    """Which kinds of attention the layers have, in the words of transformers' `layer_types`."""
    config = _text_config(model)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return frozenset(kinds)
    return frozenset({SLIDING if getattr(config, "sliding_window", None) else FULL})


def _text_config(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _cast(mask: Tensor, model: Any) -> Tensor:
    """Cast the mask: eager attention adds it in float32, torch's fused attention wants the dtype of the queries."""
    implementation = getattr(_text_config(model), "_attn_implementation", "eager")
    dtype = next(model.parameters()).dtype
    if implementation == "eager" or dtype == mask.dtype:
        return mask
    # Clamped first: the lowest float32 would become -inf, and a row of nothing else NaN.
    return mask.clamp(min=torch.finfo(dtype).min).to(dtype)


def _add_window(mask: Tensor, position_ids: Tensor, window: int) -> Tensor:
    keys = torch.arange(mask.shape[-1], device=mask.device)
    too_old = keys <= position_ids.unsqueeze(-1) - window  # (1, queries, keys)
    return mask.masked_fill(too_old.unsqueeze(1), torch.finfo(mask.dtype).min)
