"""Outputs that depend on random values: shape and dtype are compared, and the report says that no more is."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
import torch
import yaml
from torch import nn

from pipeline import Pipeline, RunConfig
from pipeline.errors import SourceError

NOISE = """<ir_version: 10, opset_import: ["": 20]>
g (float[2, 8] x) => (float[2, 8] y, float[2, 8] z) {
    r = RandomNormalLike (x)
    b = Identity (x)
    y = Add (r, b)
    z = Exp (b)
}"""


def run(folder: Path, model: dict[str, object], recipe: list[str]) -> dict[str, dict[str, dict[str, str]]]:
    """Output → how it was judged, by what ran it."""
    data = {"model": model, "passes": {"recipe": recipe}, "runtime": {"backends": ["onnxruntime", "plan"]}}
    (folder / "noise.yaml").write_text(yaml.safe_dump(data))
    Pipeline(RunConfig.from_yaml(folder / "noise.yaml"), folder / "out").run()
    report = json.loads((folder / "out" / "report.json").read_text())
    ran = {"export": report["export"], **{backend["name"]: backend for backend in report["runtime"]["backends"]}}
    assert report["export"]["random"] == ["y"]
    assert any("'y' (random values;" in said for said in report["coverage"]["not_covered"])
    return {
        name: {output: error["judged_as"] for output, error in part["errors"].items()} for name, part in ran.items()
    }


def test_an_onnx_file_that_draws(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(NOISE), tmp_path / "noise.onnx")
    judged = run(tmp_path, {"onnx": "noise.onnx"}, ["eliminate_identity"])
    assert judged == {key: {"y": "random", "z": "float32"} for key in ("export", "onnxruntime", "plan")}


class Prenet(nn.Module):
    """A dropout that is always on, as in SpeechT5, and a result that does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": nn.functional.dropout(self.linear(x), 0.5, training=True), "z": self.linear(x).exp()}


def prenet() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Prenet().eval(), (torch.ones(2, 8),)


def test_a_module_that_draws(tmp_path: Path) -> None:
    judged = run(tmp_path, {"factory": f"{__name__}:prenet"}, [])
    assert judged == {key: {"y": "random", "z": "float32"} for key in ("export", "onnxruntime", "plan")}


def test_nothing_to_compare_is_an_error(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(NOISE.replace(", float[2, 8] z", "")), tmp_path / "noise.onnx")
    with pytest.raises(SourceError, match="every output of the model depends on random values"):
        run(tmp_path, {"onnx": "noise.onnx"}, [])


def test_passes_are_proven_after_noise_of_torch(tmp_path: Path) -> None:
    """Torch draws other numbers than the export, which is its own reference then: a pass that loses a layer is seen."""
    (tmp_path / "own.py").write_text(
        "import numpy as np\nfrom onnx import numpy_helper\n\n\ndef zero(model):\n"
        "    for tensor in model.graph.initializer:\n"
        "        if list(tensor.dims) == [8, 8]:\n"
        "            tensor.CopyFrom(numpy_helper.from_array(np.zeros((8, 8), np.float32), tensor.name))\n"
        "    return model\n"
    )
    data = {
        "model": {"factory": f"{__name__}:noisy_decoder"},
        "passes": {"recipe": ["default", f"{tmp_path}/own.py:zero"]},
        "runtime": {"backends": []},
    }
    result = Pipeline(RunConfig.from_mapping(data), tmp_path / "out").run()
    assert result.passes[-1].status.counts_as_reverted and result.passes[-1].errors["y"].max_abs > 0.01
    assert not [row.name for row in result.passes[:-1] if row.status.counts_as_reverted]


class NoisyDecoder(nn.Module):
    """A decoder that adds noise after each layer, as those of StyleGAN and of voices do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        z = x.exp()
        for layer in self.layers:
            x = layer(x).tanh() + 0.1 * torch.randn_like(x)
        return {"y": x, "z": z}


def noisy_decoder() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return NoisyDecoder().eval(), (torch.ones(2, 8),)
