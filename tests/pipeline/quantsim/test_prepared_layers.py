"""Steps of `quantsim.prepare` that move factors between weights: the ratio of each layer before and after them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from typer.testing import CliRunner

from passes.weights.detached import attach
from pipeline.cli import app
from tests.pipeline.quantsim.pictures_of_qdq import model_of

PICTURE = """g (float[4, 8] x) => (float[4, 6] y) {
    a = Gemm(x, first)
    r = Relu(a)
    y = Gemm(r, second)
}"""


def weights() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    first, second = draw.normal(size=(8, 16)), draw.normal(size=(16, 6))
    first[:, 3] *= 60
    second[3] /= 60
    return {"first": first.astype(np.float32), "second": second.astype(np.float32)}


def samples(count: int) -> list[np.ndarray]:
    draw = np.random.default_rng(1)
    return [draw.normal(size=(4, 8)).astype(np.float32) for _ in range(count)]


def simulate(folder: Path, count: int, step: str, **verify: Any) -> tuple[str, dict[str, Any]]:
    onnx.save(attach(model_of(PICTURE, **weights())), folder / "net.onnx")
    (folder / "data").mkdir()
    for index, x in enumerate(samples(count)):
        np.savez(folder / "data" / f"{index:02}.npz", x=x)
    settings = {
        "model": {"onnx": "net.onnx"},
        "passes": {"recipe": []},
        "runtime": {"backends": ["onnxruntime"]},
        "verify": {"inputs": "data", "max_inputs": 4, **verify},
        "quantsim": {
            "profile": "weight-only",
            "rules": {"op:*": {"weights": "int4"}},
            "prepare": [step],
            "calibration": {"data": "data", "samples": 4},
            "evaluation": 3,
        },
    }
    (folder / "net.yaml").write_text(yaml.safe_dump(settings))
    arguments = ["quantsim", str(folder / "net.yaml"), "--out", str(folder / "out"), "--verbose"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split()), json.loads((folder / "out" / "quantsim.json").read_text())


def ratio_db(x: list[np.ndarray], weight: np.ndarray) -> float:
    """Of a product with a weight of 4 bits, one scale and no zero point, for all rows together."""
    scale = np.abs(weight).max() / 7
    rounded = np.rint(weight / scale) * scale
    signal, noise = (sum(float(((rows @ part) ** 2).sum()) for rows in x) for part in (weight, weight - rounded))
    return 10 * np.log10(signal / noise)


def test_each_layer_has_its_ratio_before_and_after_on_samples_that_no_step_has_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output, report = simulate(tmp_path, 12, "cross-layer-equalization")
    [row] = report["optimized"]
    assert (row["name"], row["kind"], row["release"], row["status"]) == (
        *("cross-layer-equalization", "prepare", "onnxsim", "ran"),
    )
    unseen, own = samples(12)[4:7], weights()
    hidden = [np.maximum(x @ own["first"], 0) for x in unseen]
    known = {layer["layer"]: layer for layer in row["layers"]}
    assert known["a"]["before_db"] == pytest.approx(ratio_db(unseen, own["first"]), abs=0.01)  # sums in another order
    assert known["y"]["before_db"] == pytest.approx(ratio_db(hidden, own["second"]), abs=0.01)
    assert known["a"]["after_db"] != known["a"]["before_db"]
    after = {
        t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "out" / "model.onnx").graph.initializer
    }
    assert known["a"]["after_db"] == pytest.approx(ratio_db(unseen, after["first"]), abs=0.01)
    assert row["outputs_db"][1] > row["outputs_db"][0]
    assert "prepare cross-layer-equalization (onnxsim):" in output
    assert f"a (first): {known['a']['before_db']:.2f} dB → {known['a']['after_db']:.2f} dB" in output
    assert "prepare cross-layer-equalization" in (tmp_path / "out" / "report.html").read_text()


def test_a_step_that_has_seen_all_samples_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output, report = simulate(tmp_path, 4, "cross-layer-equalization")
    [row] = report["optimized"]
    assert not row["layers"]
    assert "prepare cross-layer-equalization: it has seen every sample, so its layers are not judged" in output


def test_a_step_that_is_reverted_has_no_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exact = {"float32": {"rtol": 0.0, "atol": 0.0}}  # other products round otherwise
    output, report = simulate(tmp_path, 12, "cross-layer-equalization", tolerances=exact)
    assert "cross-layer-equalization did not stand (reverted)" in output
    assert not report["optimized"]
