"""Tiny causal LMs with random weights, and the pair of programs that a test runs them as."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from pipeline.export.parts.pair import (
    PREFILL_INPUTS,
    CacheSizes,
    Decode,
    KVMapping,
    Prefill,
    Program,
    cache_specs,
    decode_input_names,
    decode_inputs,
    decode_output_names,
    kv_mapping,
    prefill_inputs,
    prefill_output_names,
)

SMALL: dict[str, Any] = {
    "vocab_size": 89,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
# The way of the experts that a graph of fixed shapes can hold; that of transformers' default has no form in ONNX.
EXPERTS = {**SMALL, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}

FAMILIES: dict[str, dict[str, Any]] = {
    "GPT2": {
        "vocab_size": 89,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "tie_word_embeddings": False,
    },
    "Llama": SMALL,
    "Qwen2": {**SMALL, "attn_implementation": "eager"},
    "Qwen3": {**SMALL, "head_dim": 16},
    "Mixtral": {**EXPERTS, "num_local_experts": 4},
    "DeepseekV3": {
        **EXPERTS,
        **MLA,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
    "Mistral": {**SMALL, "sliding_window": 3},  # every layer has a window
    "Gemma3Text": {
        **SMALL,
        "head_dim": 8,
        "tie_word_embeddings": False,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
CLASSES = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}


@pytest.fixture
def causal_lm() -> Callable[..., Any]:
    """A model of a family in eval mode, with weights large enough that every position gets another token."""

    def make(family: str, **settings: Any) -> Any:
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**{**FAMILIES.get(family, SMALL), **settings})
        model = getattr(transformers, CLASSES.get(family, f"{family}ForCausalLM"))(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(1 if parameter.ndim == 1 else 50 if "embed" in name or "wte" in name else 5)
        return model

    return make


Compile = Callable[[nn.Module, tuple[torch.Tensor, ...], tuple[str, ...], tuple[str, ...]], Any]


@pytest.fixture
def programs() -> Callable[..., tuple[Program, Program, KVMapping]]:
    """The pair of programs of a model; `compiled` makes something that runs of a wrapper, its inputs and the names."""

    def make(model: nn.Module, sizes: CacheSizes, compiled: Compile) -> tuple[Program, Program, KVMapping]:
        specs = cache_specs(model)
        layers = len(specs) // 2
        names = (PREFILL_INPUTS, prefill_output_names(layers))
        prefill = Program(compiled(Prefill(model), prefill_inputs(sizes, "cpu"), *names), *names)
        names = (decode_input_names(layers), decode_output_names(layers))
        decode = Program(compiled(Decode(model), decode_inputs(specs, sizes, "cpu"), *names), *names)
        return prefill, decode, kv_mapping(prefill.outputs, decode.inputs, decode.outputs)

    return make
