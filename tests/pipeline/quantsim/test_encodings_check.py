"""`onnxline check --encodings`: each fault of a file is found in a file that was whole before."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from passes.encodings.aimet import AimetVersion, aimet_text
from passes.weights.detached import DetachedModel, attach
from pipeline.cli import app
from pipeline.config import QuantSimConfig
from pipeline.quantsim.calibration import calibrate
from pipeline.quantsim.encodings import encode
from pipeline.quantsim.encodings_check import EncodingsReport, check_encodings
from pipeline.quantsim.placement import place
from pipeline.quantsim.profiles import rules_of
from tests.pipeline.quantsim.pictures_of_qdq import model_of

DRAW = np.random.default_rng(0)
WEIGHT = DRAW.normal(size=(8, 4, 1, 1)).astype(np.float32)
BIAS = DRAW.normal(size=8).astype(np.float32)


def network() -> DetachedModel:
    return model_of(
        """g (float[1, 4, 4, 4] x) => (float[1, 16, 8] y) {
            [conv] c = Conv(x, weight, bias)
            r = Relu(c)
            s = Reshape(r, shape)
            y = Transpose <perm = [0, 2, 1]>(s)
        }""",
        weight=WEIGHT,
        bias=BIAS,
        shape=np.array([1, 8, 16]),
    )


def whole_file(version: AimetVersion) -> dict[str, Any]:
    """What a simulation writes: nothing of what only moves numbers."""
    model = network()
    placement = place(model, rules_of(QuantSimConfig(profile="qnn-htp"), model))
    samples = [{"x": DRAW.normal(size=(1, 4, 4, 4)).astype(np.float32)}]
    encodings = encode(placement, calibrate(model, placement, samples), model)
    own = {name: encoding for name, encoding in encodings.items() if name not in ("s", "y")}
    return json.loads(aimet_text(own, {"weight", "bias"}, version))


def check(data: object, folder: Path) -> EncodingsReport:
    path = folder / "model.encodings"
    path.write_text(json.dumps(data))
    return check_encodings(network(), path, "qnn-htp")


@pytest.mark.parametrize("version", ["0.6.1", "1.0.0", "2.0.0", "2.1.0"])
def test_what_a_simulation_writes_is_complete(version: AimetVersion, tmp_path: Path) -> None:
    report = check(whole_file(version), tmp_path)
    said = list(report.lines())
    assert report.is_complete, said
    assert any("--custom_io" in line for line in said) == (version != "0.6.1")
    assert any("--use_quantize_v2" in line for line in said) == (version in ("2.0.0", "2.1.0"))


def test_a_bias_is_complete_where_its_data_was_pooled(tmp_path: Path) -> None:
    """A pooled value has the numbers, and so the scale, of what was pooled; the file names that alone."""
    model = model_of(
        """g (float[1, 4, 4, 4] x) => (float[1, 3] y) {
            c = Conv(x, weight, bias)
            r = Relu(c)
            p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]>(r)
            s = Reshape(p, shape)
            y = Gemm(s, matrix, row)
        }""",
        weight=WEIGHT,
        bias=BIAS,
        shape=np.array([1, 32]),
        matrix=DRAW.normal(size=(32, 3)).astype(np.float32),
        row=DRAW.normal(size=3).astype(np.float32),
    )
    placement = place(model, rules_of(QuantSimConfig(profile="qnn-htp"), model))
    samples = [{"x": DRAW.normal(size=(1, 4, 4, 4)).astype(np.float32)}]
    encodings = encode(placement, calibrate(model, placement, samples), model)
    own = {name: encoding for name, encoding in encodings.items() if name not in ("p", "s")}
    path = tmp_path / "model.encodings"
    path.write_text(aimet_text(own, {"weight", "bias", "matrix", "row"}, "1.0.0"))
    report = check_encodings(model, path, "qnn-htp")
    assert report.is_complete, list(report.lines())
    without = {name: encoding for name, encoding in own.items() if name != "r"}
    path.write_text(aimet_text(without, {"weight", "bias", "matrix", "row"}, "1.0.0"))
    assert {fault.tensor for fault in check_encodings(model, path, "qnn-htp").missing} >= {"r", "row"}


def row(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(
        row for part in ("activation_encodings", "param_encodings") for row in data[part] if row["name"] == name
    )


def leave_out_input(data: dict[str, Any]) -> None:
    data["activation_encodings"].remove(row(data, "x"))


def name_after_node(data: dict[str, Any]) -> None:
    row(data, "r")["name"] = "conv"


def move_weight(data: dict[str, Any]) -> None:
    data["activation_encodings"].append(data["param_encodings"].pop())


def shift_weight(data: dict[str, Any]) -> None:
    row(data, "weight")["offset"] = [0] * 8


def raise_offset(data: dict[str, Any]) -> None:
    row(data, "x")["offset"] = [3]


def drop_channel(data: dict[str, Any]) -> None:
    for key in ("scale", "offset"):
        row(data, "weight")[key].pop()


def repeat(data: dict[str, Any]) -> None:
    data["activation_encodings"].append(row(data, "x"))


def requantize_moved(data: dict[str, Any]) -> None:
    data["activation_encodings"].append({**row(data, "r"), "name": "s", "scale": [1.0]})


def name_integers(data: dict[str, Any]) -> None:
    data["activation_encodings"].append({**row(data, "r"), "name": "shape"})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (leave_out_input, "x: input, Conv; expected uint16"),
        (name_after_node, "conv: is the name of a node; encodings are for tensors"),
        (move_weight, "weight: is listed in activation_encodings; it belongs to param_encodings"),
        (shift_weight, "weight: is symmetric and has the offset 0, expected -128"),
        (raise_offset, "x: has the offset 3; offsets are zero or less"),
        (drop_channel, "weight: "),
        (repeat, "x: has 2 entries; a converter takes one of them"),
        (requantize_moved, "s: has another encoding than r, whose elements Reshape moves"),
        (name_integers, "shape: is a tensor of another type than floats"),
    ],
)
def test_each_fault_is_found(damage: Callable[[dict[str, Any]], None], said: str, tmp_path: Path) -> None:
    data = copy.deepcopy(whole_file("1.0.0"))
    damage(data)
    lines = list(check(data, tmp_path).lines())
    assert any(line.strip().startswith(said) for line in lines), lines


def test_the_minimum_of_an_old_file_agrees_with_its_scale(tmp_path: Path) -> None:
    data = whole_file("0.6.1")
    data["activation_encodings"]["x"][0]["min"] *= 2
    assert any("x: says the minimum" in line for line in check(data, tmp_path).lines())


def test_the_command_ends_with_1_and_names_its_options(tmp_path: Path) -> None:
    onnx.save(attach(network()), tmp_path / "net.onnx")
    data = whole_file("1.0.0")
    leave_out_input(data)
    (tmp_path / "net.encodings").write_text(json.dumps(data))
    words = ["check", str(tmp_path / "net.onnx"), "--encodings", str(tmp_path / "net.encodings")]
    assert CliRunner().invoke(app, [*words, "--target", "qnn-htp"]).exit_code == 1
    refused = CliRunner().invoke(app, words)
    assert "give --target NAME, and no other option" in str(refused.exception)
    refused = CliRunner().invoke(app, [*words, "--target", "rknn"])
    assert "expected a profile that places encodings" in str(refused.exception)
