"""A local folder of `from_pretrained` as the source, in one line: class, weights and inputs come from the folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config import ModelConfig, RunConfig
from pipeline.errors import ConfigError, SourceError
from pipeline.export import TorchSource, draw_inputs, load_source, run_torch
from tests.pipeline.export.tiny_pretrained import FAMILIES, save_tiny

Configured = Callable[..., ModelConfig]

TOKENS = ["input_ids: int64[batch, sequence]", "attention_mask: int64[batch, sequence]"]
INPUTS = {
    "BertForMaskedLM": [*TOKENS, "token_type_ids: int64[batch, sequence]"],
    "GPT2LMHeadModel": TOKENS,
    "LlamaForCausalLM": TOKENS,
    "ViTForImageClassification": ["pixel_values: float32[batch, 3, 16, 16]"],
    "T5ForConditionalGeneration": [*TOKENS, "decoder_input_ids: int64[batch, decoder_sequence]"],
    "WhisperForConditionalGeneration": [
        "input_features: float32[batch, 4, 20]",
        "decoder_input_ids: int64[batch, decoder_sequence]",
    ],
    "CLIPModel": [TOKENS[0], "pixel_values: float32[batch, 3, 16, 16]", TOKENS[1]],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT; to be read."""
    path = tmp_path_factory.mktemp("bert")
    save_tiny("BertForMaskedLM", path)
    return path


@pytest.fixture
def changed(folder: Path, tmp_path: Path) -> Path:
    """The same, for one test to change."""
    return Path(shutil.copytree(folder, tmp_path / "bert"))


def open_source(configured: Configured, folder: Path | str, **model: Any) -> TorchSource:
    source = load_source(configured(transformers=str(folder), **model))
    assert isinstance(source, TorchSource)
    return source


@pytest.mark.parametrize("name", FAMILIES)
def test_one_line_is_enough(configured: Configured, tmp_path: Path, name: str) -> None:
    model = save_tiny(name, tmp_path / "saved")
    source = open_source(configured, "saved")
    assert [str(spec) for spec in source.inputs] == INPUTS[name]
    assert source.weights == f"from {tmp_path}/saved"
    sizes = {dim: sizes[1] for dim, sizes in source.dims.items()}
    feeds = draw_inputs(source.inputs, sizes, seed=1)
    actual = run_torch(source, feeds)
    with torch.no_grad():
        expected = model(**{key: torch.from_numpy(array) for key, array in feeds.items()})
    for key, array in actual.items():
        if "." not in key:
            np.testing.assert_allclose(array, expected[key].numpy(), atol=1e-5, err_msg=key)
    for mask in (feeds[key] for key in feeds if key == "attention_mask"):
        assert (mask[:, 0] == 1).all() and (mask == 0).any()


def test_shards_pickles_and_a_wider_dtype(configured: Configured, tmp_path: Path) -> None:
    model = save_tiny("LlamaForCausalLM", tmp_path / "shards", dtype=torch.bfloat16, max_shard_size="2KB")
    assert (tmp_path / "shards/model.safetensors.index.json").is_file()
    source = open_source(configured, "shards")
    weights = {name: tensor.float() for name, tensor in model.state_dict().items()}
    for name, tensor in source.module.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, weights[name]), name
    assert ["use_cache" in note for note in source.notes] == [True, False]
    assert "dtype bfloat16 is set to float32, which holds the same weights" in source.notes[1]

    (tmp_path / "bin").mkdir()
    shutil.copy(tmp_path / "shards/config.json", tmp_path / "bin")
    torch.save(model.state_dict(), tmp_path / "bin/pytorch_model.bin")
    kept = {"folder": str(tmp_path / "bin"), "config": {"dtype": "bfloat16", "use_cache": True}}
    source = load_source(configured(transformers=kept))
    assert isinstance(source, TorchSource) and source.notes == ()
    assert source.module.dtype == torch.bfloat16
    assert len(source.outputs) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_configuration_without_a_dtype_takes_that_of_the_weights(
    configured: Configured, tmp_path: Path, dtype: torch.dtype
) -> None:
    """As old folders of the hub have it, MiniLM's among them."""
    model = save_tiny("BertForMaskedLM", tmp_path / "old", dtype=dtype)
    config = json.loads((tmp_path / "old/config.json").read_text())
    config.pop("dtype")
    (tmp_path / "old/config.json").write_text(json.dumps(config))
    source = open_source(configured, "old")
    stored = model.state_dict()
    for name, tensor in source.module.state_dict().items():
        assert tensor.dtype == dtype and torch.equal(tensor, stored[name]), name


def test_declared_inputs_refine_or_replace_what_is_derived(configured: Configured, folder: Path) -> None:
    source = open_source(configured, folder, inputs={"input_ids": {"range": [3, 5]}}, dims={"batch": [4]})
    assert len(source.inputs) == 3
    assert (source.inputs[0].low, source.inputs[0].high) == (3, 5)
    assert source.dims == {"batch": (4,), "sequence": (8, 5)}
    source = open_source(configured, folder, inputs={"input_ids": {"shape": [1, 7]}})
    assert [str(spec) for spec in source.inputs] == ["input_ids: int64[1, 7]"]
    assert source.inputs[0].high == 30


def test_another_class_takes_its_part_and_says_what_is_left(configured: Configured, folder: Path) -> None:
    section = {"folder": str(folder), "class": "BertModel", "config": {"attn_implementation": "eager"}}
    with pytest.raises(SourceError, match=r"does not fit BertModel: 2 missing: pooler.dense.bias, pooler"):
        load_source(configured(transformers=section))
    source = load_source(configured(transformers={**section, "class": "BertLMHeadModel", "config": {}}))
    assert isinstance(source, TorchSource) and type(source.module).__name__ == "BertLMHeadModel"


def test_a_folder_is_taken_without_its_weights(configured: Configured, folder: Path) -> None:
    source = load_source(configured(transformers=str(folder)), weightless=True)
    assert isinstance(source, TorchSource)
    assert all(parameter.is_meta for parameter in source.module.parameters())
    assert [str(spec) for spec in source.inputs] == INPUTS["BertForMaskedLM"]
    data = {
        "model": {"transformers": str(folder)},
        "export": {"weights": "referenced"},
        "verify": {"proof": "structure"},
    }
    assert RunConfig.from_mapping(data).checkpoint == str(folder)


def test_random_weights_are_called_random(configured: Configured) -> None:
    section = {"class": "BertForMaskedLM", "config": FAMILIES["BertForMaskedLM"]}
    source = load_source(configured(transformers=section, seed=7))
    assert isinstance(source, TorchSource)
    assert source.weights == "random, seed 7"
    assert [str(spec) for spec in source.inputs] == INPUTS["BertForMaskedLM"]


def test_folders_that_lack_something(configured: Configured, changed: Path) -> None:
    def refusal(**section: Any) -> str:
        with pytest.raises(SourceError) as caught:
            load_source(configured(transformers={"folder": str(changed), **section}))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    text = (changed / "config.json").read_text()

    def with_keys(**keys: Any) -> None:
        (changed / "config.json").write_text(json.dumps({**json.loads(text), **keys}))

    assert "owner/name'; relative paths are relative to the configuration file" in refusal(folder="owner/name")
    assert "call `hf download OWNER/NAME" in refusal(folder="owner/name")
    assert "is a file, expected a folder" in refusal(folder=str(changed / "config.json"))
    assert "has no key 'hidden_sizes'; did you mean 'hidden_size'?" in refusal(config={"hidden_sizes": 1})
    with_keys(architectures=None)
    assert "has no 'architectures'; name the class" in refusal()
    with_keys(architectures=["NoSuchModel"])
    assert "has no class 'NoSuchModel'" in refusal()
    with_keys(auto_map={"AutoModel": "own.Model"})
    assert "has code of its own (auto_map), which is not run" in refusal()
    with_keys(quantization_config={"quant_method": "gptq"})
    assert "are quantized (gptq)" in refusal()
    (changed / "config.json").write_text("{")
    assert "config.json is not JSON" in refusal()
    (changed / "config.json").write_text(text)
    (changed / "model.safetensors").write_bytes(b"")
    assert "not a whole safetensors file" in refusal()
    (changed / "model.safetensors").unlink()
    assert "has no weights (model.safetensors.index.json" in refusal()
    (changed / "tf_model.h5").touch()
    assert "weights of TensorFlow: fetch the safetensors" in refusal()
    (changed / "config.json").unlink()
    assert "has no config.json" in refusal()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "the key 'class' is missing: expected the name of a model class, such as ViTModel, or 'folder'"),
        ({"folder": "a", "checkpoint": "b"}, "found 'checkpoint' next to 'folder', expected one of them"),
        ({"folder": "a", "config": "b.json"}, "found a path as 'config' next to 'folder'"),
    ],
)
def test_settings_that_contradict_each_other(configured: Configured, section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(transformers=section)
    assert message in str(caught.value)


def test_neither_folder_nor_mapping(configured: Configured) -> None:
    with pytest.raises(ConfigError, match=r"found a list, expected a folder that save_pretrained wrote, or a mapping"):
        configured(transformers=["a"])


@pytest.mark.parametrize("setting", ["HF_HUB_OFFLINE=1", "HF_ENDPOINT=http://127.0.0.1:9"])
def test_a_hub_that_cannot_be_reached_is_one_sentence(setting: str, tmp_path: Path) -> None:
    """huggingface_hub reads both when it is imported, so a process of its own asks."""
    (tmp_path / "hub.yaml").write_text("model: {transformers: nobody/nothing, task: text-generation}\n")
    name, _, value = setting.partition("=")
    command = [sys.executable, "-m", "onnxline", "run", str(tmp_path / "hub.yaml"), "--out", str(tmp_path / "out")]
    environment = {**os.environ, "HF_HOME": str(tmp_path), name: value}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    (line,) = ended.stderr.strip().splitlines()
    assert "no folder 'nobody/nothing', nor has huggingface_hub's cache this model, and the hub cannot be rea" in line
    assert line.endswith(
        "call `hf download nobody/nothing --local-dir FOLDER` where there is a network, and name that folder"
    )
