"""Parts of a model whose weights stay in the checkpoint: `configs/kimi_k25.yaml` with smaller numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors import safe_open
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from passes.graph.layer_calls import layer_functions
from pipeline import Pipeline, RunConfig
from pipeline.ir import Role, from_json
from pipeline.parts import PartsResult
from tests.support.paths import ROOT

SMALL = {
    "dtype": "float32",  # onnxruntime has no kernels for bfloat16
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a small model, with each expert by itself, as `save_pretrained` writes it."""
    settings = [f"model.transformers.config.{key}={value}" for key, value in SMALL.items()]
    config = RunConfig.from_yaml(ROOT / "configs" / "kimi_k25.yaml", settings).model.transformers
    assert config is not None and isinstance(config.config, dict)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoint")
    DeepseekV3ForCausalLM(DeepseekV3Config(**config.config)).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def result(checkpoint: Path) -> PartsResult:
    settings = [f"model.transformers.config.{key}={value}" for key, value in SMALL.items()]
    settings += [f"model.transformers.checkpoint={checkpoint}", "model.cache={kind: static, length: 32, chunk: 8}"]
    settings += ["passes.recipe=[eliminate_identity, eliminate_deadend]"]
    config = RunConfig.from_yaml(ROOT / "configs" / "kimi_k25.yaml", settings)
    found = Pipeline(config, checkpoint / "out").run()
    assert isinstance(found, PartsResult)
    return found


def test_the_models_lie_next_to_the_shards_and_refer_to_them(result: PartsResult, checkpoint: Path) -> None:
    models = result.folder / "models"
    assert {file.name for file in models.iterdir()} == {"config.json", "decode.onnx", "kv_mapping.json", "prefill.onnx"}
    for name in ("prefill", "decode"):
        assert (models / f"{name}.onnx").resolve() == checkpoint / f"kimi_k25-{name}.onnx"
        proto = onnx.load(models / f"{name}.onnx", load_external_data=False)
        entries = [entry for tensor in proto.graph.initializer for entry in tensor.external_data]
        assert {entry.value for entry in entries if entry.key == "location"} == {"model.safetensors"}
        [function] = layer_functions(proto).values()
        assert sum(node.op_type == function.name for node in proto.graph.node) == 2  # the first layer is dense


def test_the_mapping_says_which_cache_is_which(result: PartsResult) -> None:
    mapping = json.loads((result.folder / "models" / "kv_mapping.json").read_text())
    assert mapping["num_layers"] == 3
    assert mapping["layers"][1]["prefill_key_output"] == "present.1.key"
    assert mapping["layers"][1]["decode_key_input"] == "past_key_values.1.key"


@pytest.mark.parametrize(("part", "tokens"), [("prefill", 8), ("decode", 1)])
def test_each_part_has_an_ir_that_names_its_weights(
    result: PartsResult, checkpoint: Path, part: str, tokens: int
) -> None:
    graph = from_json(json.loads((result.folder / "parts" / part / "ir.json").read_text()))
    shapes = {graph.values[vid].name: graph.values[vid].spec.shape for vid in graph.inputs}
    assert shapes["input_ids"] == (1, tokens)
    assert shapes["past_key_values.2.key"] == (1, 1, 32, 16)
    assert not graph.payloads.keys() & {value.vid for value in graph.values if value.spec.nbytes > 1024}
    stored = {value.name for value in graph.values if value.role is Role.CONST}
    with safe_open(checkpoint / "model.safetensors", "np") as shards:
        assert "model.layers.2.mlp.experts.7.up_proj.weight" in stored & set(shards.keys())
    assert not (result.folder / "parts" / part / "plan.json").exists()


def test_all_structures_are_kept(result: PartsResult) -> None:
    assert result.parts.keys() == {"prefill", "decode"}
    for part in result.parts.values():
        assert len(part.structures) >= 3 * 5
        assert all(verdict.kept for verdict in part.structures)


def test_prefill_computes_what_torch_computes(result: PartsResult, checkpoint: Path) -> None:
    """The run itself has compared nothing: this model is small enough to."""
    session = onnxruntime.InferenceSession(checkpoint / "kimi_k25-prefill.onnx", providers=["CPUExecutionProvider"])
    ids = np.arange(8, dtype=np.int64)[None]
    feeds = {info.name: np.zeros(info.shape, np.float32) for info in session.get_inputs()}
    [logits] = session.run(["logits"], {**feeds, "input_ids": ids, "cache_position": np.arange(8)})
    with torch.no_grad():
        expected = DeepseekV3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)(torch.from_numpy(ids)).logits
    np.testing.assert_allclose(np.asarray(logits), expected.numpy(), atol=1e-5)  # float32 over three layers
