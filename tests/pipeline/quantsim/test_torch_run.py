"""The cross-check in torch by torchao, which has an environment of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess

import pytest

from pipeline.errors import UsageError
from pipeline.quantsim.torch_nodes import TorchRun
from tests.pipeline.quantsim.pictures_of_qdq import rule
from tests.pipeline.quantsim.test_qdq import quantize_mlp
from tests.support.paths import ROOT

CODE = """
import sys
import numpy as np
from passes.weights.sessions import Session
from pipeline.quantsim.torch_nodes import TorchRun
from tests.pipeline.quantsim.pictures_of_qdq import rule
from tests.pipeline.quantsim.test_qdq import quantize_mlp

quantized = quantize_mlp(rule("op:*", *sys.argv[1:]))
x = np.random.default_rng(0).uniform(-3, 3, (2, 4)).astype(np.float32)
ours, theirs = Session.of(quantized).run({"x": x}), TorchRun(quantized).run({"x": x})
print("steps", float(np.abs(ours["y"] - theirs["y"]).max()) * 255 / 8)
"""


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is here")
def test_without_torchao_it_says_so() -> None:
    with pytest.raises(UsageError, match="the cross-check in torch needs torchao: pip install torchao"):
        TorchRun(quantize_mlp(rule("op:*", "int8/channel", "uint8")))


@pytest.mark.skipif(not os.environ.get("TORCHAO_PYTHON"), reason="TORCHAO_PYTHON names no interpreter that has torchao")
@pytest.mark.parametrize("weights", ["int8/channel", "int8", "int4/block4", "int6/channel"])
def test_torchao_computes_what_the_specification_says(weights: str) -> None:
    command = [os.environ["TORCHAO_PYTHON"], "-c", CODE, weights, "uint8"]
    ran = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    steps = float(ran.stdout.split("steps")[1])
    assert steps == pytest.approx(0, abs=1e-3) or steps == pytest.approx(1, rel=1e-3)  # of a sum at the edge
