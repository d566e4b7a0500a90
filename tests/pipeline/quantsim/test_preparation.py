"""The run before a simulation: a step that does not stand is on the terminal, and inputs may have other names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml
from typer.testing import CliRunner

from passes.weights.detached import attach
from pipeline.cli import app
from tests.pipeline.quantsim.pictures_of_qdq import model_of

MASKED = """g (float[2, 6, 12] h, int64[2, 1, 6] seen) => (float[2, 6, 12] y) {
    k = MatMul(h, keys)
    kt = Transpose <perm = [0, 2, 1]> (k)
    s = MatMul(h, kt)
    f = Cast <to = 1> (seen)
    hidden = Sub(one, f)
    mask = Mul(hidden, lowest)
    masked = Add(s, mask)
    p = Softmax(masked)
    y = MatMul(p, h)
}"""


def simulate(folder: Path, settings: dict[str, object]) -> str:
    (folder / "net.yaml").write_text(yaml.safe_dump(settings))
    result = CliRunner().invoke(app, ["quantsim", str(folder / "net.yaml"), "--out", str(folder / "out")])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize("stands", [True, False])
def test_a_mask_is_clamped_by_the_data_or_the_terminal_says_why_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stands: bool
) -> None:
    """A mask of the lowest float leaves no bits for the scores. Random draws hide whole rows, and data does not."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    keys = (draw.normal(size=(12, 12)) / 4).astype(np.float32)
    constants = {"keys": keys, "one": np.float32(1), "lowest": np.finfo(np.float32).min}
    text = MASKED if stands else MASKED.replace("Add(s, mask)", "Add(s, limited)")
    limit = "" if stands else "limited = Max(mask, lowest) "
    model = model_of(text.replace("masked =", f"{limit}masked ="), **constants)
    onnx.save(attach(model), tmp_path / "net.onnx")
    (tmp_path / "data").mkdir()
    for index in range(3):
        seen = np.ones((2, 1, 6), np.int64)
        seen[1, 0, 4:] = 0
        np.savez(tmp_path / "data" / f"{index}.npz", h=draw.normal(size=(2, 6, 12)).astype(np.float32), seen=seen)
    settings = {
        "model": {"onnx": "net.onnx"},
        "passes": {"recipe": []},
        "runtime": {"backends": ["onnxruntime"]},
        "quantsim": {"prepare": ["clamp-mask"], "calibration": {"data": "data"}},
    }
    output = simulate(tmp_path, settings)
    report = json.loads((tmp_path / "out" / "quantsim.json").read_text())
    assert (report["outputs"]["y"]["sqnr_db"] > 20) is stands
    assert ("clamp-mask did not stand (reverted)" in output) is not stands
    assert any("clamp-mask did not stand" in note for note in report["notes"]) is not stands


def test_an_input_with_another_name_and_an_open_dim_is_known_by_both_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(
        "import torch\n"
        "class Tiny(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.dense = torch.nn.Linear(4, 3)\n"
        "    def forward(self, wave):\n"
        "        return torch.tanh(self.dense(wave))\n"
        "def make():\n"
        "    torch.manual_seed(0)\n"
        "    return Tiny().eval(), (torch.randn(9, 4),)\n"
    )
    output = simulate(
        tmp_path,
        {
            "model": {"factory": "tiny.py:make", "inputs": {"wave": {"shape": ["time", 4]}}},
            "export": {"input_names": ["past_key_0"]},
            "runtime": {"backends": ["onnxruntime"]},
        },
    )
    assert "output" in output
    quantized = onnx.load(tmp_path / "out" / "model.qdq.onnx").graph
    assert [value.name for value in quantized.input] == ["past_key_0"]
    assert quantized.input[0].type.tensor_type.shape.dim[0].dim_param == "time"
