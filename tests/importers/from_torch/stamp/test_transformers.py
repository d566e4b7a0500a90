"""Models of transformers: the stamped graph is the traced one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tests.importers.from_torch.stamp.comparing import expect_stamped

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2}
LATENT = {
    **EXPERTS,
    "n_routed_experts": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 4,
    "moe_intermediate_size": 8,
}
GPT2 = {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": 32, "n_positions": 64}
"""Widths, no larger than it takes; the values are ours."""


@pytest.mark.parametrize(
    ("name", "config", "settings"),
    [
        ("BertModel", "BertConfig", SMALL),
        ("GPT2LMHeadModel", "GPT2Config", GPT2),
        ("LlamaForCausalLM", "LlamaConfig", GROUPED),
        ("MixtralForCausalLM", "MixtralConfig", {**EXPERTS, "num_local_experts": 4}),
        ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT),
    ],
)
def test_a_model_of_transformers(name: str, config: str, settings: dict[str, Any]) -> None:
    with torch.device("meta"):
        small = getattr(transformers, config)(**settings, attn_implementation="eager")
        model = getattr(transformers, name)(small).eval()
        ids = torch.zeros(1, 6, dtype=torch.int64)
        expect_stamped(model, (ids,), {} if name == "BertModel" else {"use_cache": False}, saved=1)
