"""Tiny models of `transformers` through the exporter, compared with onnxruntime at two sizes of every dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pipeline.config import ExportConfig, ModelConfig
from pipeline.export import TorchSource, export_onnx, load_source, named_dims

IDS = {"input_ids": {"shape": ["batch", "seq"], "dtype": "int64", "range": [0, 20]}}
MASK = {"attention_mask": {"shape": ["batch", "seq"], "dtype": "int64", "range": [1, 2]}}
PIXELS = {"pixel_values": {"shape": ["batch", 3, 16, 16]}}
ENDS = {"bos_token_id": 0, "eos_token_id": 0}
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 20,
    "max_position_embeddings": 16,
}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "ViTModel": (
        {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
        | {"image_size": 16, "patch_size": 8},
        PIXELS,
        ("last_hidden_state", "pooler_output"),
    ),
    "BertModel": (SMALL, {**IDS, **MASK}, ("last_hidden_state", "pooler_output")),
    "GPT2LMHeadModel": (
        {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 20, "n_positions": 16, **ENDS},
        IDS,
        ("logits", "past_key_values.layers.0.keys", "past_key_values.layers.0.values"),
    ),
    "LlamaForCausalLM": ({**SMALL, **ENDS, "num_key_value_heads": 1, "use_cache": False}, {**IDS, **MASK}, ("logits",)),
    "ResNetModel": (
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        PIXELS,
        ("last_hidden_state", "pooler_output"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_onnxruntime(
    name: str, configured: Callable[..., ModelConfig], assert_agrees: Callable[..., None]
) -> None:
    config, inputs, outputs = CASES[name]
    source = load_source(configured(transformers={"class": name, "config": config}, inputs=inputs))
    assert isinstance(source, TorchSource)
    exported = export_onnx(source, ExportConfig())
    assert exported.source.outputs == outputs
    sizes = [{"batch": 2, "seq": 2}, {"batch": 3, "seq": 5}]
    for size in sizes:
        assert_agrees(exported, **{dim: size[dim] for dim in named_dims(exported.source.inputs)})
    assert exported.parameters
    assert exported.parameters <= dict(source.module.named_parameters(remove_duplicate=False)).keys()


DECODE = """
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

def make():
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    config = LlamaConfig(**sizes, vocab_size=20, num_key_value_heads=1)
    model, cache = LlamaForCausalLM(config).eval(), DynamicCache(config=config)
    with torch.no_grad():
        model(torch.ones(2, 4, dtype=torch.long), past_key_values=cache)
    return model, (), {"past_key_values": cache, "input_ids": torch.tensor([[3], [4]])}
"""


def test_a_cache_goes_in_and_comes_out(factory: Callable[..., ModelConfig], assert_agrees: Callable[..., None]) -> None:
    held = {"shape": ["batch", 1, "past", 8]}
    inputs = {f"past_key_values.layers.0.{part}": held for part in ("keys", "values")}
    source = load_source(
        factory(DECODE, inputs={"input_ids": {"shape": ["batch", 1]}, **inputs}, dims={"past": [4, 6]})
    )
    assert isinstance(source, TorchSource)
    exported = export_onnx(source, ExportConfig())
    keys, values = inputs
    assert tuple(value.name for value in exported.ir_model.graph.inputs) == ("input_ids", keys, values)
    assert exported.source.outputs == ("logits", f"{keys}_out", f"{values}_out")
    assert_agrees(exported, batch=3, past=6)
