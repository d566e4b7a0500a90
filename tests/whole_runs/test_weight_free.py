"""The whole journey of a model whose weights stay in the shards of its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers

from pipeline import Pipeline, RunConfig
from pipeline.errors import ConfigError, UsageError

LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 32,
    "use_cache": False,
}
IDS = np.arange(8)[None]


@pytest.fixture(scope="module")
def module() -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval()


@pytest.fixture
def checkpoint(tmp_path: Path, module: Any) -> Path:
    """What `save_pretrained` writes: four shards and their index."""
    module.save_pretrained(tmp_path / "llama", max_shard_size="140KB")
    return tmp_path / "llama"


@pytest.fixture
def config(checkpoint: Path) -> Callable[..., RunConfig]:
    def make(**sections: Any) -> RunConfig:
        section = {"class": "LlamaForCausalLM", "config": LLAMA, "checkpoint": "llama"}
        inputs = {"input_ids": {"shape": [1, 8], "dtype": "int64", "range": [0, 512]}}
        data = {
            "name": "free",
            "model": {"transformers": section, "inputs": inputs},
            "export": {"weights": "referenced"},
            "verify": {"proof": "structure"},
            "passes": {"keep": ["qkv", "rmsnorm"]},
        }
        return RunConfig.from_mapping({**data, **sections}, checkpoint.parent)

    return make


def digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}


def test_a_llama_goes_through_without_its_weights(
    config: Callable[..., RunConfig], checkpoint: Path, module: Any, tmp_path: Path
) -> None:
    before = digests(checkpoint)

    result = Pipeline(config(), tmp_path / "run").run()

    assert digests(checkpoint) == before
    assert len(before) > 2
    assert result.model == checkpoint / "free.onnx"
    assert [row.status for row in result.passes if row.status != "ran"] == []
    assert {(verdict.kind, verdict.kept) for verdict in result.structures} == {("qkv", True), ("rmsnorm", True)}
    onnx.checker.check_model(str(result.model))
    actual = onnxruntime.InferenceSession(result.model).run(None, {"input_ids": IDS})[0]
    with torch.no_grad():
        expected = module(torch.from_numpy(IDS)).logits.numpy()
    np.testing.assert_allclose(np.asarray(actual), expected, atol=1e-5, rtol=1e-4)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["not_compared"].startswith("verify.proof is structure: nothing was run")
    assert "No number was compared" in (tmp_path / "run" / "report.html").read_text()

    again = Pipeline(config(), tmp_path / "run").run()
    assert again.cached == ("export", "passes")


def test_the_same_with_proof_by_numbers(config: Callable[..., RunConfig], checkpoint: Path, tmp_path: Path) -> None:
    """The module gets its weights then, and every change is compared with what torch computes."""
    settings = {"verify": {"draws": 1}, "passes": {"recipe": ["default"], "keep": ["qkv"]}}
    result = Pipeline(config(**settings, runtime={"backends": ["plan"]}), tmp_path / "run").run()
    assert all(errors.ok for backend in result.runtime.backends for errors in backend.errors.values())
    assert all(row.errors for row in result.passes if row.changed)
    placed = {
        tensor.external_data[0].value
        for tensor in onnx.load(result.model, load_external_data=False).graph.initializer
        if tensor.external_data
    }
    assert placed == set(digests(checkpoint))


def test_a_file_of_somebody_else_is_not_replaced(
    config: Callable[..., RunConfig], checkpoint: Path, tmp_path: Path
) -> None:
    (checkpoint / "free.onnx").write_bytes(b"a model of theirs")
    with pytest.raises(UsageError, match=r"free\.onnx is there already, and onnxline has not written it"):
        Pipeline(config(passes={"recipe": []}), tmp_path / "run").run()
    assert (checkpoint / "free.onnx").read_bytes() == b"a model of theirs"


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"runtime": {"backends": ["plan"]}}, "found runtime.backends plan with verify.proof structure"),
        ({"model": {"factory": "a.py:make"}}, "without a checkpoint to refer to"),
        ({"model": {"onnx": "a.onnx", "checkpoint": "llama"}}, "found 'checkpoint' next to 'onnx'"),
        ({"verify": {"proof": "structural"}}, "expected .*numbers.*structure"),
    ],
)
def test_settings_that_cannot_be_meant(config: Callable[..., RunConfig], sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(**sections)


def test_the_resolved_settings_run_again(config: Callable[..., RunConfig]) -> None:
    resolved = config().to_mapping()
    assert resolved["runtime"]["backends"] == []
    assert RunConfig.from_mapping(resolved) == config()
