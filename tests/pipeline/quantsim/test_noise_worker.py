"""The noise of a small model, which the command measures in a fork."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx

from passes.weights.detached import attach
from pipeline.config import RunConfig
from pipeline.quantsim import QuantSim
from tests.pipeline.quantsim.pictures_of_qdq import mlp

CONFIG = "{model: {onnx: mlp.onnx}, passes: {recipe: []}, quantsim: {sensitivity: false}}"


def test_noise_of_a_fork_is_that_of_one_process(tmp_path: Path) -> None:
    """The command has one thread and forks; this process has pytest's modules, and measures all by itself."""
    onnx.save(attach(mlp()), tmp_path / "mlp.onnx")
    config = tmp_path / "mlp.yaml"
    config.write_text(CONFIG)
    QuantSim(RunConfig.from_yaml(config), tmp_path / "alone").run()
    words = [sys.executable, "-m", "onnxline", "quantsim", config, "--out", tmp_path / "forked"]
    subprocess.run(words, check=True, capture_output=True)
    alone, forked = ((tmp_path / name / "quantsim.json").read_text() for name in ("alone", "forked"))
    assert forked == alone
    assert all(isinstance(row["local_db"], float) for row in json.loads(forked)["rows"])
