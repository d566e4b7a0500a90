"""What AIMET's loader takes with `strict=True` of a simulation by `qnn-htp`: a tied table, a shared cache.

AIMET runs in the environment whose interpreter AIMET_PYTHON names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from typer.testing import CliRunner

from passes.encodings.aimet import read_aimet
from passes.weights.detached import attach, read_model
from pipeline.cli import app
from pipeline.quantsim.encodings_check import check_encodings
from pipeline.quantsim.encodings_file import find_own_quantizers
from pipeline.quantsim.sites import find_sites
from tests.pipeline.quantsim.pictures_of_qdq import model_of
from tests.support.interpreters import AIMET, ask

CACHE = """g (int64[1, 4] tokens, float[1, 2, 8] past) => (float[1, 4, 16] y, float[1, 6, 8] present) {
    x = Gather(table, tokens)
    q = MatMul(x, w)
    k = Tanh(q)
    present = Concat <axis = 1>(past, k)
    t = Transpose <perm = [0, 2, 1]>(present)
    s = MatMul(q, t)
    p = Softmax(s)
    h = MatMul(p, present)
    sizes = Shape(past)
    dims = Cast <to = 1>(sizes)
    n = ReduceSum <keepdims = 0>(dims)
    scaled = Mul(h, n)
    turned = Transpose <perm = [1, 0]>(table)
    y = MatMul(scaled, turned)
}"""


def simulate(folder: Path, **quantsim: Any) -> str:
    draw = np.random.default_rng(0).standard_normal
    weights: dict[str, Any] = {"table": draw((16, 8)).astype(np.float32), "w": draw((8, 8)).astype(np.float32)}
    onnx.save(attach(model_of(CACHE, **weights)), folder / "cache.onnx")
    settings: Mapping[str, Any] = {
        "model": {"onnx": "cache.onnx", "inputs": {"tokens": {"range": [0, 16]}}},
        "passes": {"recipe": []},
        "quantsim": {"profile": "qnn-htp", "evaluation": 1, "calibration": {"samples": 2}, **quantsim},
    }
    (folder / "cache.yaml").write_text(yaml.safe_dump(settings))
    result = CliRunner().invoke(app, ["quantsim", str(folder / "cache.yaml"), "--out", str(folder / "out")])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_cache_that_others_read_has_one_scale_and_the_flag_of_aimets_own_quantizer(tmp_path: Path) -> None:
    output = " ".join(simulate(tmp_path).split())
    assert "untie is added: 1 copy of tied weights, as AIMET refuses" in output
    path = tmp_path / "out" / "model.encodings"
    found = read_aimet(path)[0]
    past, present = found["past"], found["present"]
    assert (str(past.precision), str(present.precision)) == ("uint16", "int16")
    assert past.scale == present.scale
    assert (past.zero_point, present.zero_point) == (1 << 15, 0)
    assert str(found["k"].precision) == "int16"  # which the Concat alone reads
    assert check_encodings(read_model(tmp_path / "out" / "model.onnx"), path, "qnn-htp").is_complete


def test_a_second_factor_is_symmetric_by_itself() -> None:
    text = """g (float[1, 4, 4] x, float[1, 4, 4] a, float[1, 4, 4] b) => (float[1, 4, 4] y, float[1, 8, 4] z) {
        z = Concat <axis = 1>(a, b) c = MatMul(x, a) d = Add(c, b) y = Tanh(d)
    }"""
    model = model_of(text)
    assert find_own_quantizers(model, find_sites(model)) == {"b"}


def test_a_step_or_a_file_of_the_users_is_left_alone(tmp_path: Path) -> None:
    assert "untie is added" not in simulate(tmp_path, prepare=["untie"])
    assert "untie is added" not in simulate(tmp_path, profile="ort-cpu")


ASK = """
import json, sys
import onnx
from aimet_onnx.quantsim import QuantizationSimModel, load_encodings_to_sim
refused = {}
for folder in sys.argv[1:]:
    try:
        model = onnx.load(folder + "/model.onnx")
        sim = QuantizationSimModel(model, param_type="int8", activation_type="int16", config_file="htp_v73")
        load_encodings_to_sim(sim, folder + "/model.encodings", strict=True)
    except Exception as error:
        refused[folder] = str(error)
print(json.dumps(refused))
"""


@pytest.mark.skipif(not os.environ.get(AIMET), reason=f"{AIMET} names no interpreter that has AIMET")
def test_aimets_loader_is_strict_and_takes_the_file(tmp_path: Path) -> None:
    simulate(tmp_path)
    symmetric = tmp_path / "symmetric"
    symmetric.mkdir()
    (symmetric / "model.onnx").write_bytes((tmp_path / "out" / "model.onnx").read_bytes())
    data = json.loads((tmp_path / "out" / "model.encodings").read_text())
    for row in data["activation_encodings"]:
        row["is_sym"] = row["is_sym"] or row["name"] == "past"
    (symmetric / "model.encodings").write_text(json.dumps(data))
    refused = ask(os.environ[AIMET], ASK, str(tmp_path / "out"), str(symmetric))
    assert list(refused) == [str(symmetric)]
    assert "symmetric: False, loaded encoding symmetric: True" in refused[str(symmetric)]
