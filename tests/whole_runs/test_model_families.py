"""Q, K and V of real model classes, as torch exports them today, through both default sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import Pipeline, RunConfig

TOKENS = {"input_ids": {"shape": [2, 8], "dtype": "int64", "range": [0, 99]}}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}

FAMILIES = {
    "ViT": {
        "transformers": {"class": "ViTModel", "config": {**SMALL, "image_size": 32, "patch_size": 8}},
        "inputs": {"pixel_values": {"shape": [1, 3, 32, 32]}},
    },
    "Bert": {"transformers": {"class": "BertModel", "config": {**SMALL, "vocab_size": 99}}, "inputs": TOKENS},
    "Llama": {
        "transformers": {
            "class": "LlamaForCausalLM",
            "config": {**SMALL, "vocab_size": 99, "num_key_value_heads": 1, "use_cache": False},
        },
        "inputs": TOKENS,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_separate_projections_survive(family: str, tmp_path: Path) -> None:
    for policy in ({"keep": ["qkv"]}, {"skip": ["fuse_qkv"]}):  # the second takes the export from the first
        data = {"name": family, "model": FAMILIES[family], "passes": policy, "verify": {"draws": 1}}
        result = Pipeline(RunConfig.from_mapping(data), tmp_path / "out").run()
        assert [verdict.kept for verdict in result.structures] == [True, True], policy
        assert len({verdict.module for verdict in result.structures}) == 2
        assert "passes" not in result.cached
