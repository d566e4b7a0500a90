"""Models of transformers: the stamped graph is the traced one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tests.pipeline.importers.from_torch.layer_dedup.both_graphs import expect_traced_graph

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
        expect_traced_graph(model, (ids,), {} if name == "BertModel" else {"use_cache": False}, saved=1)


SPEECH: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_mel_bins": 8,
    "max_source_positions": 10,
}
T5: dict[str, Any] = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 4,
    "num_decoder_layers": 4,
    "num_heads": 2,
    "vocab_size": 32,
}
SIDE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "bos_token_id": None,
    "eos_token_id": 2,
}


def clip_config() -> Any:
    text, vision = {**SIDE, "vocab_size": 32}, {**SIDE, "image_size": 8, "patch_size": 4}
    return transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)


@pytest.mark.filterwarnings("ignore:`isinstance")  # torch's own, while it functionalizes T5
@pytest.mark.parametrize(
    ("name", "config", "inputs"),
    [
        ("T5ForConditionalGeneration", lambda: transformers.T5Config(**T5), ("input_ids", "decoder_input_ids")),
        ("WhisperModel", lambda: transformers.WhisperConfig(**SPEECH), ("input_features", "decoder_input_ids")),
        ("CLIPModel", clip_config, ("input_ids", "pixel_values")),
    ],
)
def test_both_stacks_of_a_model(name: str, config: Any, inputs: tuple[str, str]) -> None:
    """A layer of each is saved; the first ones of T5 differ from the others."""
    with torch.device("meta"):
        given = {
            "input_ids": torch.zeros(1, 6, dtype=torch.int64),
            "decoder_input_ids": torch.zeros(1, 4, dtype=torch.int64),
            "input_features": torch.zeros(1, 8, 20),
            "pixel_values": torch.zeros(1, 3, 8, 8),
        }
        model = getattr(transformers, name)(config()).eval()
        kwargs = {key: given[key] for key in inputs} | ({} if name == "CLIPModel" else {"use_cache": False})
        expect_traced_graph(model, (), kwargs, saved=2)
