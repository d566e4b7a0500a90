"""The example's Kimi model against transformers' DeepseekV3ForCausalLM: the same weights, the same logits."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from kimi_k25_text_local import KimiK25TextForCausalLM, KimiTextConfig, fill, shrunk
from pipeline.errors import UsageError
from pipeline.export.parts.pair import Decode, Prefill, causal_mask
from tests.support.paths import EXAMPLES

CONFIG = EXAMPLES / "kimi_k25_text_local" / "config.json"
TOKENS = 90


@pytest.fixture
def config() -> KimiTextConfig:
    """Small, and stretched by yarn so far that each of its numbers matters within 90 tokens."""
    full = KimiTextConfig.from_json(CONFIG)
    yarn = replace(full.yarn, factor=8.0, original_max_position_embeddings=64, beta_fast=4.0, mscale_all_dim=0.7)
    return replace(shrunk(full), yarn=yarn, rope_theta=50.0)


@pytest.fixture
def ours(config: KimiTextConfig) -> KimiK25TextForCausalLM:
    model = KimiK25TextForCausalLM(config, "cpu")
    fill(model)
    return model


def theirs(model: KimiK25TextForCausalLM, config: KimiTextConfig) -> Any:
    """transformers' class with the same weights; it keeps those of all experts of a layer in two tensors."""
    plain = {
        entry.name: getattr(config, entry.name) for entry in fields(config) if entry.name not in ("yarn", "rope_theta")
    }
    yarn = {entry.name: getattr(config.yarn, entry.name) for entry in fields(config.yarn)}
    rope = {"rope_type": "yarn", "rope_theta": config.rope_theta, **yarn}
    other = {"num_key_value_heads": config.num_attention_heads, "n_group": 1, "topk_group": 1}
    twin = DeepseekV3ForCausalLM(DeepseekV3Config(**plain, **other, rope_parameters=rope)).eval()
    twin.load_state_dict(stack_experts(model.state_dict(), config), strict=True)
    return twin


def stack_experts(state: dict[str, torch.Tensor], config: KimiTextConfig) -> dict[str, torch.Tensor]:
    state_of_twin = {name: tensor for name, tensor in state.items() if ".experts." not in name}
    for layer in range(config.first_k_dense_replace, config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([state[f"{prefix}.{expert}.{name}.weight"] for expert in range(config.n_routed_experts)])
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        state_of_twin |= {f"{prefix}.gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}.down_proj": down}
    return state_of_twin


@pytest.mark.parametrize("length", [3, TOKENS], ids=["gathered", "all_experts"])
def test_same_logits_as_transformers(ours: KimiK25TextForCausalLM, config: KimiTextConfig, length: int) -> None:
    torch.manual_seed(1)
    ids = torch.randint(0, config.vocab_size, (1, length))
    positions = torch.arange(length)
    with torch.no_grad():
        actual = ours(ids, causal_mask(positions, length), positions.unsqueeze(0)).logits
        expected = theirs(ours, config)(input_ids=ids).logits
    assert float(expected.abs().max()) > 1
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_full_size_has_the_checkpoints_names_and_a_trillion_parameters() -> None:
    three, four = ({name: weight.shape for name, weight in full_size(n).named_parameters()} for n in (3, 4))
    assert four["model.layers.3.mlp.experts.17.gate_proj.weight"] == (2048, 7168)
    assert four["model.layers.3.mlp.gate.e_score_correction_bias"] == (384,)
    assert four["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] == (512 + 64, 7168)
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" not in four
    layer = {name: shape for name, shape in four.items() if name not in three}
    assert len(three) + 58 * len(layer) == 69_975
    # The published 1.03 T, without the vision tower.
    assert (
        1.02e12
        < sum(weight.numel() for weight in three.values()) + 58 * sum(weight.numel() for weight in layer.values())
        < 1.03e12
    )


def test_layers_lie_together_and_the_cache_is_never_the_latent() -> None:
    model = full_size(layers=2)
    positions = torch.arange(128, device="meta")
    _, *states = Prefill(model)(positions.unsqueeze(0), causal_mask(positions, 128), positions.unsqueeze(0))
    assert [tuple(state.shape) for state in states] == [(1, 64, 128, 192), (1, 64, 128, 128)] * 2
    caches = [state.new_zeros(1, 64, 2048, state.shape[-1]) for state in states]
    at = torch.full((1,), 128, device="meta")
    inputs = (at.unsqueeze(0), causal_mask(at, 2048), at.unsqueeze(0), at, *caches)
    with torch.no_grad():
        nodes = torch.export.export(Decode(model), inputs, strict=False).graph.nodes
    modules = ["".join(path for path, _ in node.meta.get("nn_module_stack", {}).values()) for node in nodes]
    layers = [layer for module in modules for layer in "01" if f"layers.{layer}." in module]
    assert layers == sorted(layers) and set(layers) == {"0", "1"}
    targets = [str(node.target) for node in nodes]
    assert targets.count("aten.index_copy.default") == 4
    assert not [name for name in targets if name.removesuffix(".default").endswith("_")]  # nothing written in place


def full_size(layers: int) -> KimiK25TextForCausalLM:
    return KimiK25TextForCausalLM(replace(KimiTextConfig.from_json(CONFIG), num_hidden_layers=layers))


def test_a_transformers_5_config_gives_the_same() -> None:
    """`rope_scaling` and `rope_theta` have moved into `rope_parameters`; `dtype` is a torch.dtype."""
    values = json.loads(CONFIG.read_text())
    moved = {**values.pop("rope_scaling"), "rope_theta": values.pop("rope_theta")}
    moved["rope_type"] = moved.pop("type")
    moved_config = KimiTextConfig.from_mapping({**values, "rope_parameters": moved, "dtype": torch.bfloat16})
    assert moved_config == KimiTextConfig.from_json(CONFIG)


def test_what_is_not_computed_is_refused(tmp_path: Path) -> None:
    text = CONFIG.read_text().replace('"n_group": 1', '"n_group": 8').replace('"yarn"', '"linear"')
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(UsageError, match=r"rope type = 'linear' \(computed: 'yarn'\); n_group = 8 \(computed: 1\)"):
        KimiTextConfig.from_json(tmp_path / "other.json")
    with pytest.raises(UsageError, match="has no factor, original_max_position_embeddings"):
        KimiTextConfig.from_mapping({})
