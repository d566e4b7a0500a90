"""`onnxline quantsim`: from a configuration to a quantized model, its encodings and a report."""

from __future__ import annotations

import html
import json
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from passes.encodings.aimet import from_aimet
from passes.graph.op_facts import opset_of
from passes.weights.detached import attach
from pipeline.cli import app
from pipeline.errors import CheckFailed, ConfigError, SourceError, UsageError
from tests.pipeline.quantsim.pictures_of_qdq import mlp, model_of
from tests.support.onnx_models import biased_attention
from tests.support.processes import start_forked

CONFIG = """
model: {onnx: mlp.onnx}
passes: {recipe: [eliminate_deadend]}
quantsim:
  rules:
    op:MatMul: {weights: int4/block4, activations: uint16}
  calibration: {data: data/*.npz}
  encodings: 2.0.0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    onnx.save(attach(mlp()), tmp_path / "mlp.onnx")
    (tmp_path / "mlp.yaml").write_text(CONFIG)
    (tmp_path / "data").mkdir()
    draw = np.random.default_rng(3)
    for index in range(4):
        np.savez(tmp_path / "data" / f"{index}.npz", x=draw.standard_normal((2, 4)).astype(np.float32))
    return tmp_path


def run(folder: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["quantsim", str(folder / "mlp.yaml"), "--out", str(folder / "out"), *options])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def at_opset(folder: Path, version: int) -> None:
    model = onnx.load(folder / "mlp.onnx")
    model.opset_import[0].version = version
    onnx.save(model, folder / "mlp.onnx")


def test_an_earlier_opset_is_converted_to_the_first_one_that_has_the_formats(folder: Path) -> None:
    at_opset(folder, 12)
    note = "the model has opset 12, and {} is the first with {}: convert-opset is added to the steps"
    assert note.format(21, "4 bits") in run(folder)
    assert opset_of(onnx.load(folder / "out" / "model.qdq.onnx")) == 21
    printed = run(folder, "--set", "quantsim.rules={}")
    assert note.format(13, "a scale for each channel") in printed
    written = json.loads((folder / "out" / "quantsim.json").read_text())
    assert note.format(13, "a scale for each channel") in written["notes"]
    assert opset_of(onnx.load(folder / "out" / "model.qdq.onnx")) == 13
    coarse = "quantsim.rules={'op:*': {weights: int8, activations: uint8}}"
    assert "convert-opset" not in run(folder, "--set", coarse)
    assert opset_of(onnx.load(folder / "out" / "model.qdq.onnx")) == 12
    suggested = run(folder, "--set", coarse, "--set", "quantsim.suggest={sqnr_db: 40.0}")  # layers may get 16 bits
    assert note.format(21, "16 bits") in suggested


def test_a_quantized_model_is_refused_with_the_way_to_simulate_its_encodings(folder: Path) -> None:
    first = re.findall("output y: .*", run(folder))
    quantized, encodings = str(folder / "out" / "model.qdq.onnx"), str(folder / "net.encodings")
    refusal = CliRunner().invoke(app, ["quantsim", quantized, "--out", str(folder / "again")]).exception
    assert re.search("found QuantizeLinear of 'x' and 3 more .* --of FLOAT.onnx -o net.encodings, and", str(refusal))
    CliRunner().invoke(app, ["encodings", quantized, "--of", str(folder / "out" / "model.onnx"), "-o", encodings])
    assert first and first == re.findall("output y: .*", run(folder, f"--set=quantsim.encodings_from={encodings}"))


def test_an_opset_that_the_recipe_chooses_is_left_and_named_before_the_calibration(folder: Path) -> None:
    chosen = "quantsim.prepare=[{convert-opset: {to: 20}}]"
    with pytest.raises(UsageError, match=r"needs opset 21, and the model has 20; put {convert-opset: {to: 21}} into"):
        run(folder, "--set", chosen)
    assert not list((folder / "out").rglob("calibration.npz"))


def test_a_conversion_that_fails_is_named_with_its_reason(folder: Path) -> None:
    """A norm with statistics for each element: from opset 9 on there is none, and onnx's converter refuses it."""
    text = """g (float[2, 3, 4] x) => (float[2, 3, 4] y) {
        n = BatchNormalization <spatial = 0> (x, s, s, s, s) y = MatMul (n, w)
    }"""
    ones, weight = np.ones((3, 4), np.float32), np.eye(4, dtype=np.float32)
    onnx.save(attach(model_of(text, 8, s=ones, w=weight)), folder / "mlp.onnx")
    with pytest.raises(UsageError, match=r"needs opset 1[03], and the model has 8") as error:
        run(folder, "--set", "quantsim.rules={}", "--set", "passes.recipe=[]", "--set", "quantsim.calibration.data=[]")
    assert any("convert-opset did not stand (failed): BatchNormalization" in note for note in error.value.__notes__)


def test_a_whole_simulation(folder: Path) -> None:
    printed = run(folder)
    assert "rule op:* (weights int8/channel, activations uint8): 2 weights, 6 others; in force for 5" in printed
    assert "rule op:MatMul (weights int4" in printed
    report = json.loads((folder / "out" / "quantsim.json").read_text())
    assert report["rows"][0]["tensor"] == "y"  # 4 bits cost most
    assert report["outputs"]["y"]["sqnr_db"] > 15
    assert [left["tensor"] for left in report["left_in_float"]] == ["h"]  # before its Relu
    assert [layer["layer"] for layer in report["layers"]] == ["y", "h"]
    assert report["quantized_weight_bytes"] < report["weight_bytes"]
    onnx.checker.check_model(str(folder / "out" / "model.qdq.onnx"))
    encodings = from_aimet(json.loads((folder / "out" / "model.encodings").read_text()))
    assert {"x", "r", "y", "first", "second"} <= encodings.keys()
    assert "t" not in encodings  # a Transpose has no quantizer in AIMET, whose strict loader refuses one there


def test_the_page_has_a_section_also_after_the_next_run_of_the_same_model(folder: Path) -> None:
    run(folder)
    assert "What dominates" in (folder / "out" / "report.html").read_text()
    result = CliRunner().invoke(app, ["run", str(folder / "mlp.yaml"), "--out", str(folder / "out")])
    assert result.exit_code == 0
    assert "What dominates" in (folder / "out" / "report.html").read_text()


def test_the_report_alone(folder: Path) -> None:
    assert json.loads(run(folder, "--json"))["format_version"] == 2


def test_both_infinities_are_words_and_null_is_what_was_not_measured(folder: Path) -> None:
    text = """g (float[2, 4] x) => (float[2, 4] same, float[2, 4] none) {
        same = Abs (x) twice = Add (x, x) also = Mul (x, two) none = Sub (twice, also)
    }"""
    onnx.save(attach(model_of(text, two=np.array(2, np.float32))), folder / "mlp.onnx")
    coarse = "quantsim.rules={op:*: {activations: float}, 'tensor:also': {activations: uint4}}"
    report = json.loads(run(folder, "--json", "--set", coarse), parse_constant=pytest.fail)
    ratios = {row["tensor"]: row["total_db"] for row in report["rows"]}
    assert ratios["same"] == ratios["twice"] == "Infinity", "nothing is rounded there"
    assert 10 < ratios["also"] < 40
    assert ratios["none"] == "-Infinity", "noise, and no signal"
    outputs = report["device_like"]["outputs"]
    assert (outputs["same"]["sqnr_db"], outputs["none"]["sqnr_db"]) == ("Infinity", "-Infinity")
    placed = json.loads(run(folder, "--json", "--set", coarse, "--set", "verify.proof=structure"))
    assert placed["device_like"] is None
    assert placed["not_measured"]


def test_without_weights_only_placement_and_sizes_are_reported(folder: Path) -> None:
    whole = json.loads(run(folder, "--json"))
    printed = run(folder, "--set", "verify.proof=structure")
    assert "nothing is calibrated or simulated, only placed: verify.proof is structure" in printed.replace("\n", " ")
    assert "in all" not in printed, "a table of noise without a row"
    report = json.loads((folder / "out" / "quantsim.json").read_text())
    for key in ("rules", "left_in_float", "weight_bytes", "quantized_weight_bytes", "tensors", "quantized_tensors"):
        assert report[key] == whole[key], key
    assert report["rows"] == report["layers"] == []
    assert report["not_measured"]
    assert "No noise was measured: verify.proof is structure" in (folder / "out" / "report.html").read_text()


def results(folder: Path) -> set[str]:
    return {path.name for path in (folder / "out").iterdir()} & {"model.qdq.onnx", "model.encodings", "quantsim.json"}


def test_a_later_simulation_without_numbers_leaves_no_quantized_model(folder: Path) -> None:
    run(folder)
    assert results(folder) == {"model.qdq.onnx", "model.encodings", "quantsim.json"}
    run(folder, "--set", "verify.proof=structure")
    assert results(folder) == {"quantsim.json"}


def test_what_was_simulated_goes_with_the_model(folder: Path) -> None:
    run(folder)
    model = (folder / "out" / "model.onnx").read_bytes()
    again = ["run", str(folder / "mlp.yaml"), "--out", str(folder / "out")]
    assert CliRunner().invoke(app, again).exit_code == 0
    assert len(results(folder)) == 3  # the same model
    proto = onnx.load(folder / "mlp.onnx")
    proto.graph.node[1].op_type = "Sigmoid"
    onnx.save(proto, folder / "mlp.onnx")
    assert CliRunner().invoke(app, again).exit_code == 0
    assert (folder / "out" / "model.onnx").read_bytes() != model
    assert not results(folder)
    assert "What dominates" not in (folder / "out" / "report.html").read_text()


def test_a_simulation_that_fails_leaves_nothing_of_an_earlier_one_and_a_mistake_leaves_all(folder: Path) -> None:
    text = '<ir_version: 10, opset_import: ["": 21]> g (float[2, 4] x) => (float[2, 4] y) { h = Erf (x) y = Relu (h) }'
    onnx.save(onnx.parser.parse_model(text), folder / "mlp.onnx")
    target = ("--set", "quantsim.rules={}", "--set", "quantsim.profile=qnn-htp")
    run(folder, *target)
    before = {name: (folder / "out" / name).read_bytes() for name in results(folder)}
    with pytest.raises(UsageError):
        run(folder, "--set", "quantsim.rules={op:Conv: {weights: int8}}")
    assert {name: (folder / "out" / name).read_bytes() for name in results(folder)} == before
    assert "What dominates" in (folder / "out" / "report.html").read_text()
    with pytest.raises(CheckFailed):
        run(folder, *target, "--set", "quantsim.unsupported=refuse")
    assert len(before) == 3
    assert not results(folder)
    assert "What dominates" not in (folder / "out" / "report.html").read_text()


LOADER = """
import time
from pathlib import Path
import numpy as np

HERE = Path(__file__).parent

def load():
    draw = np.random.default_rng(0)
    for index in range(6):
        x = draw.standard_normal((2, 4)).astype(np.float32) * (1 if index else 100)
        if index == 3 and (HERE / "stop").exists():
            (HERE / "stop").unlink()
            time.sleep(600)
        yield {"x": x * 0 if index < 3 and (HERE / "zeros").exists() else x}
"""
"""Stops before the fourth sample where it is asked to. With `zeros`, the first three say nothing of the range."""


def test_what_a_killed_calibration_has_measured_is_taken_up(folder: Path) -> None:
    (folder / "load.py").write_text(LOADER)
    settings = (f"quantsim.calibration.data={folder}/load.py:load", "quantsim.calibration.method=percentile")
    options = [word for setting in settings for word in ("--set", setting)]
    run(folder, *options)
    expected = [(folder / "out" / name).read_bytes() for name in ("model.qdq.onnx", "model.encodings")]
    shutil.rmtree(folder / "out")

    (folder / "stop").touch()
    words = ("-m", "onnxline", "quantsim", "mlp.yaml", "--out", "out", *options)
    process = start_forked(*words, said=folder / "said.txt", folder=folder)
    until = time.monotonic() + 120
    while (folder / "stop").exists() and process.is_alive() and time.monotonic() < until:
        time.sleep(0.05)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not results(folder)

    (folder / "zeros").touch()  # so the numbers of the first three samples are known from the killed run alone
    run(folder, *options)
    found = [(folder / "out" / name).read_bytes() for name in ("model.qdq.onnx", "model.encodings")]
    assert found == expected
    run(folder, *options)
    again = [(folder / "out" / name).read_bytes() for name in ("model.qdq.onnx", "model.encodings")]
    assert again != expected  # a run that has come to its end is no reason to trust the loader


def test_a_loader_is_called_with_the_arguments_of_the_section(folder: Path) -> None:
    code = "import numpy as np\ndef load(peak=1.0):\n    yield {'x': np.full((2, 4), peak, np.float32)}\n"
    (folder / "load.py").write_text(code)
    data = (
        "--set",
        f"quantsim.calibration.data={folder}/load.py:load",
        "--set",
        "quantsim.rules={op:*: {activations: uint8}}",
    )
    scales = []
    for peak in (1.0, 4.0):
        run(folder, *data, "--set", f"quantsim.calibration.args.peak={peak}")
        scales.append(from_aimet(json.loads((folder / "out" / "model.encodings").read_text()))["x"].scale.item())
    assert scales == pytest.approx([1 / 255, 4 / 255])
    with pytest.raises(ConfigError, match="found args without a loader in data"):
        run(folder, "--set", "quantsim.calibration.args.peak=1.0")
    with pytest.raises(SourceError, match=r"raises TypeError: load.* got an unexpected keyword argument 'peek'"):
        run(folder, *data, "--set", "quantsim.calibration.args.peek=1.0")


def test_sizes_are_those_of_the_stored_numbers(folder: Path) -> None:
    report = json.loads(run(folder, "--json"))
    first, bias, second = 4 * 8, 8, 8 * 3
    assert report["weight_bytes"] == 4 * (first + bias + second) + 2 * 8  # and the two sizes of the Reshape
    weights = first + 8 * (4 + 1)  # int8, a scale for each of 8 channels
    biases = 4 * bias + 8 * (4 + 4)  # int32
    blocks = second // 2 + 6 * 4 + 6 // 2  # int4, two blocks for each of 3 channels
    assert report["quantized_weight_bytes"] == weights + biases + blocks + 2 * 8


def test_structures_have_rows_of_their_own(folder: Path) -> None:
    model = biased_attention()
    model.opset_import[0].version, model.ir_version = 21, 10
    onnx.save(model, folder / "mlp.onnx")
    run(folder, "--set", "quantsim.rules={op:*: {activations: uint8}}", "--set", "quantsim.calibration.data=[]")
    report = json.loads((folder / "out" / "quantsim.json").read_text())
    (row,) = report["structures"]
    steps = {tensor["tensor"]: tensor["local_db"] for tensor in report["rows"]}
    assert row["kind"] == "attention"
    assert row["local_db"] == steps[row["worst"]]
    assert "Structures by their results, worst first (1)" in (folder / "out" / "report.html").read_text()


def test_a_model_with_bodies_is_simulated_around_them_and_their_tensors_are_listed(folder: Path) -> None:
    text = """g (float[2, 4] x) => (float[2, 4] y) {
        h = MatMul (x, w) s = ReduceSum <keepdims = 0> (h) c = Greater (s, zero)
        z = If (c) <
            then_branch = th () => (float[2, 4] t) { k = Constant <value_float = 2.0> () t = Mul (h, k) },
            else_branch = el () => (float[2, 4] e) { e = Neg (h) }
        >
        y = Relu (z)
    }"""
    weight = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    onnx.save(attach(model_of(text, w=weight, zero=np.array(0, np.float32))), folder / "mlp.onnx")
    run(folder, "--set", "quantsim.rules={op:*: {weights: int8, activations: uint8}}")
    report = json.loads((folder / "out" / "quantsim.json").read_text())
    in_float = {row["tensor"]: row["reason"] for row in report["left_in_float"]}
    assert in_float == dict.fromkeys(("t", "k", "e"), "made in a body of If")
    assert {row["tensor"] for row in report["rows"]} == {"h", "s", "z", "y"}
    assert 10 < report["outputs"]["y"]["sqnr_db"] < 60


def test_floats_of_8_bits_are_simulated_and_left_out_of_the_encodings(folder: Path) -> None:
    printed = run(folder, "--set", "quantsim.rules={op:*: {weights: fp8e4m3/channel, activations: fp8e4m3}}")
    assert "model.encodings leaves" in " ".join(printed.split())
    report = json.loads((folder / "out" / "quantsim.json").read_text())
    assert {row["precision"] for row in report["rows"]} == {"fp8e4m3"}
    assert report["outputs"]["y"]["sqnr_db"] > 15
    assert from_aimet(json.loads((folder / "out" / "model.encodings").read_text())) == {}


def test_notes_on_formats_and_on_onnxruntime_are_printed_kept_and_on_the_page(folder: Path) -> None:
    printed = " ".join(run(folder, "--set", "quantsim.rules={op:*: {activations: int4/channel}}").split())
    report = json.loads((folder / "out" / "quantsim.json").read_text())
    assert report["device_like"]["dropped"] == [{"op": "Relu", "tensor": "r", "dtype": "int4"}]
    page = html.unescape((folder / "out" / "report.html").read_text())
    for sentence in ("says int4/channel of 5 activations: each has one scale", "such as the Relu of 'r' before int4"):
        assert sentence in printed
        assert sentence in page


def test_a_folder_of_samples_is_taken_whole(folder: Path) -> None:
    run(folder, "--set", f"quantsim.calibration.data={folder}/data")
    whole = (folder / "out" / "model.encodings").read_text()
    run(folder)
    assert (folder / "out" / "model.encodings").read_text() == whole


def test_a_model_that_gives_nan_is_named(folder: Path) -> None:
    text = "g (float[2, 4] x) => (float[2, 4] y) { r = Sqrt(x) y = Neg(r) }"
    onnx.save(attach(model_of(text)), folder / "mlp.onnx")
    np.savez(folder / "data" / "0.npz", x=np.full((2, 4), -1, np.float32))
    positive = "model.inputs={x: {shape: [2, 4], range: [0.5, 1]}}"
    with pytest.raises(UsageError, match=r"'r' is NaN on a sample|output 'y' of the float model holds NaN on a sample"):
        run(folder, "--set", "quantsim.rules={'op:*': {activations: uint8}}", "--set", positive)


def test_random_data_is_named(folder: Path) -> None:
    assert "no calibration data is given" in run(folder, "--set", "quantsim.calibration.data=[]").replace("\n", " ")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("quantsim.rules={op:Conv: {weights: int8}}", "'op:Conv' matches no tensor"),
        ("quantsim.rules={op:MatMul: {weights: int99}}", "found the format 'int99'"),
        ("quantsim.calibration.data=none/*.npz", "quantsim.calibration.data: no file matches"),
        ("quantsim.profile=npu", "profile"),
        (
            "quantsim.profile={aimet_config: a.json, weight_bits: 1}",
            "profile.weight_bits: found 1, expected 2 or more$",
        ),
        ("quantsim.rules={op:MatMul: {}}", "op:MatMul: found a mapping, expected weights, activations, or both"),
        (
            "quantsim.rules={'module:a.*': {weights: int8}}",
            "'module:a.*' matches no tensor; no module of the model has",
        ),
        ("quantsim.suggest={}", "quantsim.suggest: found .* expected one target: sqnr_db or size"),
        ("quantsim.calibration.percentile=99", "found percentile with the method minmax, expected it with percentile"),
        ("quantsim.calibration={method: percentile, percentile: 101}", "found 101, expected at most 100"),
        ("quantsim.calibration.data={}/empty", "the folder '.*empty' holds no file of samples"),
        ("quantsim.calibration.data={}/nan.npz", r"data: nan.npz: 'x' holds NaN \(1 of 8 numbers\)"),
    ],
)
def test_mistakes_are_named(folder: Path, setting: str, message: str) -> None:
    (folder / "empty").mkdir()
    np.savez(folder / "nan.npz", x=np.array([[1, 2, 3, np.nan], [1, 2, 3, 4]], np.float32))
    with pytest.raises(UsageError, match=message):
        run(folder, "--set", setting.replace("{}/", f"{folder}/"))


def test_a_suggestion_is_printed_and_kept(folder: Path) -> None:
    printed = run(folder, "--set", "quantsim.suggest={sqnr_db: 30}")
    assert "suggestion for at least 30 dB: " in printed
    suggestion = json.loads((folder / "out" / "quantsim.json").read_text())["suggestion"]
    assert suggestion["is_met"]
    assert suggestion["sqnr_db"] >= 30
    page = (folder / "out" / "report.html").read_text()
    assert "Mixed precision" in page
    assert all(selector in page for selector in suggestion["rules"])


@pytest.mark.parametrize("unsupported", ["note", "refuse"])
def test_operators_that_the_target_lacks_are_notes_or_a_failed_check(folder: Path, unsupported: str) -> None:
    text = '<ir_version: 10, opset_import: ["": 21]> g (float[2, 4] x) => (float[2, 4] y) { h = Erf (x) y = Relu (h) }'
    onnx.save(onnx.parser.parse_model(text), folder / "mlp.onnx")
    settings = ["quantsim.rules={}", "quantsim.profile=qnn-htp", f"quantsim.unsupported={unsupported}"]
    options = [word for setting in settings for word in ("--set", setting)]
    if unsupported == "refuse":
        with pytest.raises(CheckFailed, match=r"qnn-htp does not take the model(.|\n)*Erf: .*fuse_gelu"):
            run(folder, *options)
    else:
        assert "Erf: the target does not have this operator" in run(folder, *options).replace("\n", " ")


def test_a_model_whose_outputs_are_whole_numbers_is_simulated_without_sensitivity(folder: Path) -> None:
    text = "g (float[2, 4] x) => (int64[2, 1] y) { h = Relu(x) r = MatMul(h, w) y = ArgMax <axis = -1> (r) }"
    onnx.save(attach(model_of(text, w=np.eye(4, dtype=np.float32))), folder / "mlp.onnx")
    printed = " ".join(run(folder, "--set", "quantsim.suggest={sqnr_db: 30}").split())
    assert "sensitivity is not estimated: no output of floats depends on a layer that is quantized" in printed
    assert "nothing is suggested, since the sensitivity of layers is not known" in printed
    report = json.loads((folder / "out" / "quantsim.json").read_text())
    assert (report["outputs"], report["layers"], len(report["rows"])) == ({}, [], 2)


def test_outputs_that_hold_no_numbers_meet_any_ratio(folder: Path) -> None:
    text = "g (float[N, 4] x) => (float[N, 4] y) { y = MatMul(x, w) }"
    onnx.save(attach(model_of(text, w=np.eye(4, dtype=np.float32))), folder / "mlp.onnx")
    for file in (folder / "data").iterdir():
        np.savez(file, x=np.zeros((0, 4), np.float32))
    run(folder, "--set", "quantsim.suggest={sqnr_db: 30}")
    suggestion = json.loads((folder / "out" / "quantsim.json").read_text())["suggestion"]
    assert (suggestion["is_met"], suggestion["rules"]) == (True, {})


def test_a_model_that_onnxruntime_optimizes_to_death_is_simulated_all_the_same(folder: Path) -> None:
    formats = "quantsim.rules={op:*: {weights: int8/block2, activations: uint8}}"
    printed = run(folder, "--set", formats)
    assert "onnxruntime runs the model only without its optimizations" in printed.replace("\n", " ")
    report = json.loads((folder / "out" / "quantsim.json").read_text())
    assert "QLinearMatMul" in report["device_like"]["not_run"]
    assert report["device_like"]["outputs"] == {}
    assert report["outputs"]["y"]["sqnr_db"] > 20
    assert report["layers"], "all else is measured"
    assert "runs the model only without" in (folder / "out" / "report.html").read_text()


def test_a_bias_that_its_format_does_not_hold_is_named(folder: Path) -> None:
    proto = onnx.load(folder / "mlp.onnx")
    for tensor in proto.graph.initializer:
        if tensor.name == "first":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.full((4, 8), 1e-9, np.float32), "first"))
    onnx.save(proto, folder / "mlp.onnx")
    formats = "quantsim.rules={op:*: {weights: uint8/channel, activations: uint8}}"
    assert "of the 8 numbers of the bias bias are beyond 32 bits" in run(folder, "--set", formats).replace("\n", " ")
