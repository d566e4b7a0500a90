"""A run with `export.functions`: torch's layers as one function, in every file, for every backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

from passes.graph.layer_calls import layer_functions
from pipeline import Pipeline, RunConfig, RunResult
from pipeline.errors import ConfigError
from pipeline.quantsim import QuantSim

NET = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = torch.softmax(q @ k.transpose(-1, -2) / 8 ** 0.5, -1) @ v
        return x + self.out(mixed.transpose(1, 2).flatten(2))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def make():
    torch.manual_seed(0)
    return Net(), (torch.randn(2, 5, 32),)
"""


def settings(folder: Path, **sections: Any) -> dict[str, Any]:
    (folder / "net.py").write_text(NET)
    return {
        "name": "net",
        "model": {"factory": str(folder / "net.py:make")},
        "export": {"functions": "layers"},
        "passes": {"recipe": ["eliminate_identity", "fold_constants", "onnxsim"], "keep": ["qkv"]},
        "runtime": {"backends": ["onnxruntime", "plan"]},
        **sections,
    }


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    folder = tmp_path_factory.mktemp("functions")
    found = Pipeline(RunConfig.from_mapping(settings(folder)), folder / "out").run()
    assert isinstance(found, RunResult)
    return found


@pytest.mark.parametrize("name", ["exported.onnx", "model.onnx"])
def test_the_layers_are_calls_of_one_function(result: RunResult, name: str) -> None:
    proto = onnx.load(result.folder / name)
    [function] = layer_functions(proto).values()
    assert function.name == "Block"
    assert [node.name for node in proto.graph.node if node.op_type == "Block"] == ["layers.0", "layers.1", "layers.2"]
    assert "q.weight" in function.input
    onnx.checker.check_model(proto, full_check=True)


def test_every_backend_gives_what_torch_gives(result: RunResult) -> None:
    backends = result.report.runtime.backends if result.report.runtime else ()
    assert {backend.name for backend in backends} == {"onnxruntime", "plan"}
    assert all(errors.ok for backend in backends for errors in backend.errors.values())


def test_q_k_and_v_are_kept_in_each_layer_and_a_fault_in_them_would_be_seen(result: RunResult) -> None:
    kept = [(verdict.module, verdict.kept) for verdict in result.structures if verdict.kind == "qkv"]
    assert kept == [("layers.0", True), ("layers.1", True), ("layers.2", True)]
    assert result.report.sensitivity is not None
    assert result.report.sensitivity.margin > 1


def test_the_report_says_which_functions_were_made(result: RunResult) -> None:
    report = json.loads((result.folder / "report.json").read_text())
    assert any(note.startswith("layers as functions: Block (") for note in report["export"]["notes"])
    proto = onnx.load(result.folder / "model.onnx")
    nodes = len(proto.graph.node) + len(proto.functions[0].node)
    assert report["passes"][-1]["nodes_after"] <= nodes  # constants of a body are nodes of the function
    assert (result.folder / "report.html").is_file()


def test_what_functions_cannot_take_is_refused_before_the_work(tmp_path: Path) -> None:
    passes = {"recipe": ["to-fp16"]}
    for sections, said in (
        ({"passes": passes}, "export.functions: found the step to-fp16, which changes inputs, outputs or types"),
    ):
        with pytest.raises(ConfigError, match=said):
            Pipeline(RunConfig.from_mapping(settings(tmp_path, **sections)), tmp_path / "out").run()


def test_quantization_takes_the_layers_apart_and_gives_each_ranges_of_its_own(tmp_path: Path) -> None:
    config = RunConfig.from_mapping(settings(tmp_path, quantsim={"profile": "qnn-htp", "sensitivity": False}))
    found = QuantSim(config, tmp_path / "out", progress=False).run()
    assert any(
        note.startswith("1 function of equal layers is inlined") and note.endswith("equal bit for bit")
        for note in found.report.notes
    )
    quantized = onnx.load(tmp_path / "out" / "model.qdq.onnx")
    assert not quantized.functions and not any(node.op_type == "Block" for node in quantized.graph.node)
    assert min(noise.sqnr_db for noise in found.report.outputs.values()) > 30
    assert layer_functions(onnx.load(tmp_path / "out" / "model.onnx"))
