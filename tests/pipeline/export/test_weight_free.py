"""A module without weights, exported, with initializers that point into a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import safetensors.torch
import torch
from torch import nn

from pipeline.config import ExportConfig, ModelConfig
from pipeline.errors import SourceError
from pipeline.export import ExportedModel, TorchSource, export_onnx, load_source
from pipeline.export.checkpoint import read_shards
from pipeline.export.external_weights import Rule, best_rule, pieces_of

Factory = Callable[..., ModelConfig]

NET = """
class Net(nn.Module):
    def __init__(self, tied, dtype, lost):
        super().__init__()
        self.table = nn.Embedding(30, 64, dtype=dtype)
        self.inner = nn.Linear(64, 64, dtype=dtype)
        self.head = nn.Linear(64, 30, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.table.weight
        self.register_buffer("scale", torch.full((64,), 3.0, dtype=dtype))
        angles = torch.arange(64, dtype=dtype) / 64
        self.register_buffer("angles", angles.to("meta") if lost else angles, persistent=False)

    def forward(self, ids):
        return self.head(torch.tanh(self.inner(self.table(ids))) * self.scale + torch.sin(self.angles))

def make(tied=False, dtype="float32", lost=False):
    return Net(tied, getattr(torch, dtype), lost)
"""
IDS = {"ids": {"shape": [2, 3], "dtype": "int64", "range": [0, 30]}}


def weightless(model: ModelConfig) -> TorchSource:
    source = load_source(model, weightless=True)
    assert isinstance(source, TorchSource)
    assert all(parameter.is_meta for parameter in source.module.parameters())
    return source


def real(model: ModelConfig) -> nn.Module:
    source = load_source(model)
    assert isinstance(source, TorchSource)
    return source.module


def export_referring(source: TorchSource, folder: Path, **pieces: list[str]) -> ExportedModel:
    return export_onnx(source, ExportConfig()).referring_to(read_shards(folder), pieces)


def save_state(
    module: nn.Module, folder: Path, rename: Callable[[str], str] = str, drop: str = ""
) -> dict[str, torch.Tensor]:
    state = {rename(name): tensor for name, tensor in module.state_dict().items() if name != drop}
    safetensors.torch.save_file({name: tensor.clone() for name, tensor in state.items()}, folder / "model.safetensors")
    return state


def outputs(exported: ExportedModel, folder: Path, ids: np.ndarray) -> np.ndarray:
    exported.save(folder / "out.onnx")
    return np.asarray(onnxruntime.InferenceSession(folder / "out.onnx").run(None, {"ids": ids})[0])


RENAMINGS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "with a prefix": lambda name: f"language_model.text.{name}",
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rename", RENAMINGS.values(), ids=RENAMINGS)
def test_it_computes_what_the_module_does(factory: Factory, tmp_path: Path, rename: Any, tied: bool) -> None:
    model = factory(NET, inputs=IDS, args={"tied": tied})
    module = real(model)
    save_state(module, tmp_path, rename, drop="table.weight" if tied else "")

    exported = export_referring(weightless(model), tmp_path)

    ids = np.arange(6).reshape(2, 3)
    with torch.no_grad():
        expected = module(torch.from_numpy(ids)).numpy()
    np.testing.assert_allclose(outputs(exported, tmp_path, ids), expected, atol=1e-5, rtol=1e-4)
    assert (tmp_path / "out.onnx").stat().st_size < 12_000
    assert not (tmp_path / "out.onnx.data").exists()
    assert f"the model refers to {4 if tied else 5} tensors of the checkpoint" in exported.notes


def test_everything_that_does_not_fit_is_listed_at_once(factory: Factory, tmp_path: Path) -> None:
    module = real(factory(NET, inputs=IDS))
    state = save_state(module, tmp_path, drop="inner.bias")
    state["head.weight"] = state["head.weight"][:20].contiguous()
    state["table.weight"] = state["table.weight"].half()
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(SourceError) as caught:
        export_referring(weightless(factory(NET, inputs=IDS, args={"lost": True})), tmp_path)
    first, *lines, last = map(str.strip, str(caught.value).splitlines())
    assert first.endswith("does not fit the model: 4 mistakes")
    assert sorted(line[:60] for line in lines) == [
        "'angles' is not in the checkpoint and has no value: it is a ",
        "'head.weight' is F32[20, 64], and the model takes F32[30, 64",
        "'inner.bias' is missing",
        "'table.weight' is F16[30, 64], and the model takes F32[30, 6",
    ]
    assert "export.pieces" in last


EXPERTS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 16, 8))

    def forward(self, ids):
        return self.up.transpose(1, 2)[ids]

def make():
    return Net()
"""


def test_pieces_are_joined_without_being_read(factory: Factory, tmp_path: Path) -> None:
    """A checkpoint has each expert, and of each two matrices, by itself."""
    model = factory(EXPERTS, inputs={"ids": {"shape": [2], "dtype": "int64", "range": [0, 4]}})
    module = real(model)
    up = module.get_parameter("up").detach()
    parts = {f"x.{e}.{half}": up[e, 8 * half : 8 * half + 8].clone() for e in range(4) for half in (0, 1)}
    safetensors.torch.save_file(parts, tmp_path / "model.safetensors")

    exported = export_referring(weightless(model), tmp_path, up=["x.#.0", "x.#.1"])

    ids = np.array([2, 0])
    expected = module(torch.from_numpy(ids)).detach().numpy()
    assert np.array_equal(outputs(exported, tmp_path, ids), expected)
    joined = [node for node in exported.ir_model.graph if node.op_type == "Concat"][:3]
    assert [(len(node.inputs), node.attributes["axis"].as_int()) for node in joined] == [(4, 0), (4, 0), (2, 1)]


def test_names_of_pieces() -> None:
    pieces = {"*.mlp.up": ["*.experts.#.gate", "*.experts.#.up"]}
    assert pieces_of("layers.3.mlp.up", 2, pieces) == [
        ["layers.3.experts.0.gate", "layers.3.experts.0.up"],
        ["layers.3.experts.1.gate", "layers.3.experts.1.up"],
    ]
    assert pieces_of("layers.3.mlp.down", 2, pieces) == []
    with pytest.raises(SourceError, match=r"'x.#' has 0 stars, expected 1"):
        pieces_of("a.up", 1, {"*.up": ["x.#"]})


@pytest.mark.parametrize(
    ("wanted", "stored", "rule"),
    [
        (["a.w", "b.w"], ["a.w", "b.w", "p.a.w"], Rule()),
        (["layers.0.w", "norm.w"], ["model.layers.0.w", "model.norm.w", "lm_head.w"], Rule(add="model.")),
        (["lm.model.a", "lm.model.b"], ["model.a", "model.b"], Rule(drop="lm.")),
        (["lm.a.w", "lm.b.w"], ["text.a.w", "text.b.w"], Rule("lm.", "text.")),
    ],
)
def test_the_rule_of_prefixes(wanted: list[str], stored: list[str], rule: Rule) -> None:
    assert best_rule({name: (name,) for name in wanted}, stored) == rule


def test_rotary_frequencies_are_kept_and_parameters_are_not_made() -> None:
    config = {"hidden_size": 2**13, "num_attention_heads": 64, "num_hidden_layers": 4, "vocab_size": 2**19}
    inputs = {"input_ids": {"shape": [1, 4], "dtype": "int64"}}
    section = {"class": "LlamaModel", "config": {**config, "intermediate_size": 2**16, "use_cache": False}}
    source = weightless(ModelConfig.model_validate({"transformers": section, "inputs": inputs}))
    assert source.buffers["rotary_emb.inv_freq"][:2].tolist() == pytest.approx([1.0, 10000 ** (-2 / 128)])
    assert source.module.get_buffer("rotary_emb.inv_freq").is_meta
    assert sum(parameter.numel() for parameter in source.module.parameters()) > 10**10
