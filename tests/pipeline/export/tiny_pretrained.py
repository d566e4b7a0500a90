"""Tiny models of several families with seeded weights, saved as `save_pretrained` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

TEXT: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
VISION: dict[str, Any] = {**TEXT, "image_size": 16, "patch_size": 8}
IDS: dict[str, Any] = {"vocab_size": 30, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SEQ2SEQ: dict[str, Any] = {
    **{"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_start_token_id": 0},
}

FAMILIES: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": {**TEXT, **IDS, "max_position_embeddings": 16},
    "GPT2LMHeadModel": {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16, **IDS},
    "LlamaForCausalLM": {**TEXT, **IDS, "num_key_value_heads": 1, "max_position_embeddings": 32},
    "ViTForImageClassification": VISION,
    "T5ForConditionalGeneration": {
        **IDS,
        **{"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0},
    },
    "WhisperForConditionalGeneration": {
        **{**SEQ2SEQ, **IDS, "num_mel_bins": 4, "max_source_positions": 10, "max_target_positions": 16},
        **{"suppress_tokens": None, "begin_suppress_tokens": None},
    },
    "CLIPModel": {
        "text_config": {**TEXT, **IDS, "max_position_embeddings": 16, "projection_dim": 8},
        "vision_config": {**VISION, "projection_dim": 8},
        "projection_dim": 8,
    },
}
"""Model class → its configuration."""


def save_tiny(name: str, folder: Path, **options: Any) -> Any:
    """Save a model of the class `name` into `folder`; `options` are those of `save_pretrained`. Returns the model."""
    cls: Any = getattr(transformers, name)
    torch.manual_seed(3)
    dtype = options.pop("dtype", torch.float32)
    model = cls(cls.config_class(**FAMILIES[name])).to(dtype).eval()
    model.save_pretrained(folder, **options)
    return model
