"""The same model in small, with random weights: what `--verify` and the tests run."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from kimi_k25_text_local.config import KimiTextConfig


def shrunk(config: KimiTextConfig, layers: int = 3) -> KimiTextConfig:
    """A few layers, narrow, in float32; positions, routing rules and scales stay those of `config`.

    4 of 16 experts: the one token of decode takes the way of gathered experts, a prompt of 4 or more that of all.
    """
    return replace(
        config,
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        n_routed_experts=16,
        num_experts_per_tok=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        dtype=torch.float32,
    )


@torch.no_grad()
def fill(model: nn.Module, seed: int = 0) -> None:
    """Random weights that keep the size of what passes through, so that every part counts in the logits."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("e_score_correction_bias"):
            parameter.normal_(0, 0.2)  # as wide as the scores are, so that it changes who is chosen
        elif parameter.ndim == 1:
            parameter.normal_(1, 0.2)
        elif "embed" in name:
            parameter.normal_()  # wider than the other matrices: else every token is followed by the same one
        else:
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
