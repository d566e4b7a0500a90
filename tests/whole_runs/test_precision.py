"""The type that decides, through a whole run: from the export to the last backend, in the report and on the page."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
import torch
import yaml
from torch import nn

from pipeline import Pipeline, RunConfig
from pipeline.export.to_onnx import find_computed_types

DOUBLE = """<ir_version: 10, opset_import: ["": 20]>
pitch (float[2, 64] x) => (double[2, 1] pitch, float[2, 64] confidence) <float[64, 1] w> {
    e = Exp (x)
    confidence = Softmax (e)
    m = MatMul (confidence, w)
    pitch = Cast <to = 11> (m)
}"""


def test_a_float64_output_that_is_made_of_float32(tmp_path: Path) -> None:
    """As swift-f0's: `plan` adds the products in another order, which 1e-10 does not allow."""
    model = onnx.parser.parse_model(DOUBLE)
    weights = torch.randn(64, 1, generator=torch.Generator().manual_seed(0)).numpy()
    del model.graph.initializer[:]
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    onnx.save(model, tmp_path / "pitch.onnx")
    data = {"model": {"onnx": "pitch.onnx"}, "passes": {"recipe": ["eliminate_identity"]}}
    (tmp_path / "pitch.yaml").write_text(yaml.safe_dump(data))
    Pipeline(RunConfig.from_yaml(tmp_path / "pitch.yaml"), tmp_path / "out").run()
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    for errors in (report["export"]["errors"], *(backend["errors"] for backend in report["runtime"]["backends"])):
        assert {name: error["judged_as"] for name, error in errors.items()} == {
            "pitch": "float32",
            "confidence": "float32",
        }
    assert report["runtime"]["backends"][1]["errors"]["pitch"]["max_abs"] > 1e-10
    assert "of float32: pitch" in (tmp_path / "out" / "report.html").read_text()


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.half().exp().float()


@pytest.mark.parametrize(("module", "types"), [(Halves(), ("float16", "float32")), (nn.Softmax(-1), ("float32",))])
def test_the_types_that_torch_computes_in(module: nn.Module, types: tuple[str, ...]) -> None:
    assert find_computed_types(torch.export.export(module, (torch.ones(2, 3),))) == types
