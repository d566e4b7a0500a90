"""`onnxline to-int8`: the quantized model of `onnxline quantsim`, by one command, with its outputs compared."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnxruntime
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import quantize_static
from typer.testing import CliRunner

import onnxline
from passes.errors import PolicyError
from passes.graph.op_facts import opset_of
from passes.weights.detached import attach, read_model
from pipeline.cli import app
from pipeline.config import RunConfig
from pipeline.errors import CheckFailed, SourceError, UsageError
from pipeline.quantsim import QuantSim
from tests.pipeline.quantsim.pictures_of_qdq import mlp, model_of, nodes_of
from tests.support.onnx_models import biased_attention, matrix

GRAPHS = {
    "tied": ("g (float[8, 8] x) => (float[8, 8] y) { a = MatMul(x, w) b = Relu(a) y = Add(b, w) }", (8, 8)),
    "open": ("g (float[n, 1, h, v] x) => (float[n, 2, i, j] y) { c = Conv(x, w) y = Relu(c) }", (2, 1, 2, 2)),
}
"""A weight of a product that an Add reads too, of which AIMET's targets want a copy; and sizes that draws choose,
which are enlarged."""

KEYS = re.compile(r"quantsim[.:]|passes\.recipe|model\.(inputs|dims)|verify\.|proof")
"""What a configuration has, and `to-int8` has not."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    onnx.save(attach(mlp()), tmp_path / "mlp.onnx")
    onnx.save(biased_attention(), tmp_path / "attention.onnx")
    draw = np.random.default_rng(3)
    for name, (text, shape) in GRAPHS.items():
        onnx.save(attach(model_of(text, w=draw.standard_normal(shape).astype(np.float32))), tmp_path / f"{name}.onnx")
    (tmp_path / "data").mkdir()
    for index in range(4):
        np.savez(tmp_path / "data" / f"{index}.npz", x=draw.standard_normal((2, 4)).astype(np.float32))
    return tmp_path


def call(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["to-int8", *map(str, words)])
    assert getattr(result.exception, "exit_code", result.exit_code) == code, (result.output, result.exception)
    return result.output + str(result.exception or "")


def without_metadata(path: Path) -> bytes:
    model = onnx.load(path)
    for entry in (model, *model.graph.node):
        del entry.metadata_props[:]
    return model.SerializeToString(deterministic=True)


def by_quantsim(folder: Path, model: Path, section: dict[str, Any]) -> Path:
    settings = {"model": {"onnx": str(model)}, "passes": {"recipe": []}, "runtime": {"backends": ["onnxruntime"]}}
    config = RunConfig.from_mapping({**settings, "quantsim": {**section, "sensitivity": False}}, folder)
    return QuantSim(config, folder / "out").run().folder / "model.qdq.onnx"


def test_a_picture(folder: Path) -> None:
    result = onnxline.to_int8(folder / "mlp.onnx", folder / "data")
    assert nodes_of(result.model) == [
        "first_dequantized = DequantizeLinear <axis: int = 1> (first_quantized, first_scale, first_zero_point)",
        "bias_dequantized = DequantizeLinear <axis: int = 0> (bias_quantized, bias_scale, bias_zero_point)",
        "second_dequantized = DequantizeLinear <axis: int = 1> (second_quantized, second_scale, second_zero_point)",
        "x_quantized = QuantizeLinear (x, x_scale, x_zero_point)",
        "x_dequantized = DequantizeLinear (x_quantized, x_scale, x_zero_point)",
        "h = Gemm (x_dequantized, first_dequantized, bias_dequantized)",
        "r = Relu (h)",
        "r_quantized = QuantizeLinear (r, r_scale, r_zero_point)",
        "r_dequantized = DequantizeLinear (r_quantized, r_scale, r_zero_point)",
        "t = Reshape (r_dequantized, shape)",
        "t_quantized = QuantizeLinear (t, t_scale, t_zero_point)",
        "t_dequantized = DequantizeLinear (t_quantized, t_scale, t_zero_point)",
        "y_float = MatMul (t_dequantized, second_dequantized)",
        "y_quantized = QuantizeLinear (y_float, y_scale, y_zero_point)",
        "y = DequantizeLinear (y_quantized, y_scale, y_zero_point)",
    ]


def test_weights_and_samples_are_within_half_a_step(folder: Path) -> None:
    """What the stored numbers stand for, by numpy: a zero point that is off by one is told by both."""
    result = onnxline.to_int8(folder / "mlp.onnx", folder / "data")
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in result.to_proto().graph.initializer}
    source = {tensor.name: numpy_helper.to_array(tensor) for tensor in attach(mlp()).graph.initializer}

    def real(name: str, numbers: np.ndarray) -> np.ndarray:
        return (numbers.astype(np.float64) - stored[f"{name}_zero_point"]) * stored[f"{name}_scale"]

    for name in ("first", "second"):
        half = 0.501 * stored[f"{name}_scale"]
        assert (np.abs(real(name, stored[f"{name}_quantized"]) - source[name]) <= half).all()
    x = np.concatenate([np.load(file)["x"] for file in sorted((folder / "data").iterdir())])
    limits = np.iinfo(stored["x_zero_point"].dtype)
    half = 0.501 * stored["x_scale"]
    assert real("x", np.array(limits.min)) - half <= x.min()
    assert x.max() <= real("x", np.array(limits.max)) + half


@pytest.mark.parametrize(
    ("name", "options", "section"),
    [
        ("mlp", {}, {}),
        ("mlp", {"samples": 2}, {"calibration": {"samples": 2}}),
        ("mlp", {"profile": "qnn-htp"}, {"profile": "qnn-htp"}),
        ("mlp", {"profile": "qnn-htp-w4a16"}, {"profile": "qnn-htp-w4a16"}),
        ("mlp", {"profile": "tensorrt"}, {"profile": "tensorrt"}),
        ("mlp", {"profile": "weight-only"}, {"profile": "weight-only"}),
        ("mlp", {"keep": ["Gem*"]}, {"rules": {"op:Gem*": {"weights": "float", "activations": "float"}}}),
        ("mlp", {"keep": ["tensor:h"]}, {"rules": {"tensor:h": {"weights": "float", "activations": "float"}}}),
        ("attention", {"seed": 3}, {"calibration": {"seed": 3}}),
        ("open", {}, {}),
        ("tied", {"profile": "qnn-htp"}, {"profile": "qnn-htp"}),
        ("attention", {"profile": "qnn-htp", "samples": 4}, {"profile": "qnn-htp", "calibration": {"samples": 4}}),
    ],
)
@pytest.mark.parametrize("opset", [12, 21])
def test_it_is_the_quantized_model_of_quantsim(
    name: str, options: dict[str, Any], section: dict[str, Any], opset: int, folder: Path
) -> None:
    """With data for `mlp`, and with draws for the others."""
    path, out = folder / f"{name}.onnx", folder / "out.onnx"
    if opset == 12 and name == "mlp":
        proto = onnx.load(path)
        proto.opset_import[0].version = opset
        onnx.save(proto, path)
    data = [str(folder / "data")] if name == "mlp" else []
    section = {**section, "calibration": {"data": data, **section.get("calibration", {})}}
    onnxline.to_int8(path, data, **options).save(out)
    assert without_metadata(out) == without_metadata(by_quantsim(folder, path, section))


def test_encodings_of_a_file_are_those_of_quantsim(folder: Path) -> None:
    quantized = by_quantsim(folder, folder / "mlp.onnx", {"calibration": {"data": str(folder / "data")}})
    file = quantized.rename(folder / "kept.onnx").with_name("net.encodings")
    (folder / "out" / "model.encodings").rename(file)
    result = onnxline.to_int8(folder / "mlp.onnx", encodings=file)
    result.save(folder / "out.onnx")
    assert "of a file" in str(result)
    assert without_metadata(folder / "out.onnx") == without_metadata(folder / "kept.onnx")


def test_what_is_said_of_outputs_is_what_onnxruntime_computes(folder: Path) -> None:
    """The ratio and the error, by sessions that onnxline did not open."""
    call(folder / "mlp.onnx", "-o", folder / "out.onnx", "--data", folder / "data")
    result = onnxline.to_int8(folder / "mlp.onnx", folder / "data")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    sessions = [onnxruntime.InferenceSession(folder / f"{name}.onnx", options) for name in ("mlp", "out")]
    feeds = [{"x": np.load(path)["x"]} for path in sorted((folder / "data").glob("*.npz"))]
    wanted, found = (np.stack([np.asarray(session.run(None, feed)[0]) for feed in feeds]) for session in sessions)
    ratio = 10 * math.log10(float((wanted**2).sum() / ((found - wanted) ** 2).sum()))
    assert result.outputs["y"].sqnr_db == pytest.approx(ratio, rel=1e-4)
    assert result.outputs["y"].max_abs == pytest.approx(float(np.abs(found - wanted).max()), rel=1e-4)
    assert (result.samples, result.compared) == (4, 4)
    assert ratio > 20


def test_models_and_samples_of_every_kind(folder: Path) -> None:
    path = folder / "mlp.onnx"
    feeds = [{"x": np.load(file)["x"]} for file in sorted((folder / "data").glob("*.npz"))]
    wanted = onnxline.to_int8(path, folder / "data").to_proto()
    assert onnxline.to_int8(onnx.load(path), feeds=feeds).to_proto() == wanted
    assert onnxline.to_int8(read_model(path), [str(folder / "data" / "*.npz")]).to_proto() == wanted
    np.save(folder / "all.npy", np.stack([feed["x"] for feed in feeds]))
    assert onnxline.to_int8(path, folder / "all.npy").to_proto() == wanted
    onnx.checker.check_model(wanted, full_check=True)


def test_an_earlier_opset_is_converted_with_proof(folder: Path) -> None:
    proto = onnx.load(folder / "mlp.onnx")
    proto.opset_import[0].version = 11
    onnx.save(proto, folder / "mlp.onnx")
    said = call(folder / "mlp.onnx", "-o", folder / "out.onnx", "--data", folder / "data")
    assert "convert-opset  4 → 4 nodes, max error 0.0e+00" in said
    assert "13 is the first with a scale for each channel" in said
    assert opset_of(onnx.load(folder / "out.onnx")) == 13


def test_what_the_command_says(folder: Path) -> None:
    said = call(folder / "mlp.onnx", "-o", folder / "out.onnx", "--data", folder / "data", "--keep", "MatMul")
    assert "5 of 8 are quantized" in said
    assert "the rule 'op:MatMul' says float" in said
    assert "outputs, compared on 4 samples" in said
    assert "dB" in said
    assert f"onnxline quantsim {folder / 'mlp.onnx'}" in said.replace("\n", " ").replace("  ", " ")
    assert call(folder / "mlp.onnx", "-o", folder / "out.onnx", "-q") == ""
    drawn = call(folder / "mlp.onnx", "-o", folder / "out.onnx")
    assert "the ranges are those of random inputs" in drawn.replace("\n", " ")


def test_a_result_is_a_table(folder: Path) -> None:
    result = onnxline.to_int8(folder / "mlp.onnx", folder / "data")
    assert repr(result) == str(result)
    assert len(str(result)) < 2000
    assert "<table>" in result._repr_html_()
    assert "array" not in str(result)


def test_a_note_names_the_option_that_helps() -> None:
    text = "g (float[2, 4] x) => (float[2, 8] y) { s = Sigmoid(x) a = MatMul(x, w) y = Concat<axis = 1>(s, a) }"
    model = attach(model_of(text, w=1000 * np.eye(4, dtype=np.float32)))
    [note] = [note for note in onnxline.to_int8(model).notes if "one scale" in note]
    assert note.endswith("leave that node in float: keep node:y")
    assert not [note for note in onnxline.to_int8(model, keep=["node:y"]).notes if "one scale" in note]
    empty = attach(model_of("g (float[0, 4] x) => (float[0, 4] y) { y = MatMul(x, w) }", w=np.eye(4, dtype=np.float32)))
    assert "give data samples with elements there" in onnxline.to_int8(empty).notes[-1]


@pytest.mark.parametrize(
    ("text", "opset", "said"),
    [
        ("g (float16[4, 4] x) => (float16[4, 4] y) { y = MatMul(x, x) }", 17, "apply to-float32 first"),
        (
            "g (float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] y) { a = Attention(x, x, x) y = MatMul(a, w) }",
            23,
            "apply dec",
        ),
        (
            "g (float[4, 4] x) => (float[4, 4] y) { a = MatMul(x, w) b = Gemm<transB=1>(a, w) y = Add(b, x) }",
            17,
            "untie",
        ),
        ("g (float[2, 4] x) => (float[2, 4] y) { a = MatMul(x, w) s = Abs(a) n = Neg(s) y = Log(n) }", 17, "give data"),
        ("g (float[2, 4] x) => (float[2, 4] y) { a = own.Unknown(x) y = MatMul(a, w) }", 17, "--custom-ops ops.py"),
        (
            "g (float[2, 4] x) => (float[2, 4] y, float[2, 4] e) { e = Exp(x) i = Div(e, z) y = MatMul(i, o) }",
            17,
            "keep tensor:i",
        ),
    ],
)
def test_messages_name_options_and_no_keys_of_a_configuration(text: str, opset: int, said: str, tmp_path: Path) -> None:
    known = {"w": np.eye(4), "z": np.zeros(1), "o": np.ones((4, 4))}
    weights = {name: array.astype(np.float32) for name, array in known.items() if re.search(rf"\b{name}\)", text)}
    model = onnx.parser.parse_model(f'<ir_version: 11, opset_import: ["": {opset}, "own": 1]> {text}')
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    onnx.save(model, tmp_path / "model.onnx")
    result = CliRunner().invoke(app, ["to-int8", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "out.onnx")])
    printed = " ".join(f"{result.output} {result.exception or ''}".split())
    assert said in printed
    assert not KEYS.search(printed)


def test_what_is_in_functions_is_quantized(folder: Path) -> None:
    """A call is one operator that no target knows, and would stay in float."""
    text = """<ir_version: 8, opset_import: ["": 17, "own": 1]>
        g (float[2, 4] x) => (float[2, 4] y) { a = own.layer(x, w) y = own.layer(a, w) }
        <domain: "own", opset_import: ["": 17]> layer (p, q) => (r) { m = MatMul(p, q) r = Sigmoid(m) }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32) / 3, "w"))
    result = onnxline.to_int8(model)
    assert "1 function is inlined" in result.notes
    assert result.placement.formats().keys() >= {"x", "w", "a", "y"}
    assert result.outputs["y"].sqnr_db > 30
    assert result.to_proto() == onnxline.to_int8(onnx.inliner.inline_local_functions(model)).to_proto()
    kept = onnxline.to_int8(model, keep=["MatMul"])
    assert {"w", "x"}.isdisjoint(kept.placement.formats())


@pytest.mark.parametrize("keep", [["first"], ["second"], ["first", "second"]])
def test_an_input_stays_in_float_where_all_that_read_it_do(keep: list[str], tmp_path: Path) -> None:
    """As onnxruntime's quantizer does with `nodes_to_exclude`."""
    text = "g (float[1, 2, 4, 4] x) => (float[1, 2, 2, 2] y, float[1, 2, 2, 2] z) "
    text += "{ a = Conv(x, v) z = Conv(x, w) y = Conv(a, u) }"
    weights = {name: np.random.default_rng(0).standard_normal((2, 2, 3, 3)).astype(np.float32) for name in "vw"}
    proto = attach(model_of(text, **weights, u=np.ones((2, 2, 1, 1), np.float32)))
    proto.graph.node[0].name, proto.graph.node[1].name = "first", "second"
    onnx.save(proto, tmp_path / "model.onnx")
    samples = iter([{"x": np.ones((1, 2, 4, 4), np.float32)}])
    reader = SimpleNamespace(get_next=lambda: next(samples, None))
    quantize_static(tmp_path / "model.onnx", tmp_path / "q.onnx", reader, nodes_to_exclude=keep)  # type: ignore[arg-type]
    theirs = {node.input[0] for node in onnx.load(tmp_path / "q.onnx").graph.node if node.op_type == "QuantizeLinear"}
    assert ("x" in onnxline.to_int8(proto, keep=keep).placement.formats()) == ("x" in theirs) == (len(keep) == 1)


def test_outputs_without_a_ratio_are_named() -> None:
    text = "g (float[2, 4] x) => (int64[2] i, float[2, 4] y) { p = MatMul(x, w) r = RandomNormalLike(x) y = Add(r, p) "
    text += "i = ArgMax<axis = 1, keepdims = 0>(y) }"
    notes = onnxline.to_int8(attach(model_of(text, w=np.eye(4, dtype=np.float32)))).notes
    assert "outputs without elements, or of other types than float16, float32 and float64, have no ratio: i" in notes
    assert [note for note in notes if note.startswith("RandomNormalLike give")]


@pytest.mark.parametrize("profile", ["ort-cpu", "qnn-htp", "tensorrt"])
def test_an_output_without_a_shape_gets_its_shape(profile: Any) -> None:
    """ONNX's checker refuses outputs without one."""
    model = attach(model_of("g (float[n, 4] x) => (float[n, 8] y) { y = MatMul(x, w) }", w=matrix(4, 8, 1)))
    model.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.checker.check_model(onnxline.to_int8(model, profile=profile).to_proto())


def test_a_weight_that_callers_may_feed_stays_in_float_by_its_bytes() -> None:
    text = "g (float[2, 4] x, float[4, 4] w) => (float[2, 4] y) { y = MatMul(x, w) }"
    result = onnxline.to_int8(attach(model_of(text, w=np.eye(4, dtype=np.float32))))
    stored = sum(onnx.numpy_helper.to_array(tensor).nbytes for tensor in result.to_proto().graph.initializer)
    assert result.bytes == (64, stored - 2 * 5)  # without the scales and zero points of x and y


def test_inputs_of_bfloat16_are_fed() -> None:
    text = "g (bfloat16[2, 4] x) => (bfloat16[2, 4] y) { f = Cast<to = 1>(x) a = MatMul(f, w) y = Cast<to = 16>(a) }"
    result = onnxline.to_int8(attach(model_of(text, w=np.eye(4, dtype=np.float32))))
    assert not result.device.not_run
    assert "w" in result.placement.formats()


def test_integer_inputs_are_fed_and_not_quantized() -> None:
    """Tokens that index a table: what is computed of them is quantized."""
    table, weight = (np.random.default_rng(seed).standard_normal((8, 8)).astype(np.float32) for seed in (0, 1))
    text = "g (int64[2, n] ids) => (float[2, n, 8] y) { e = Gather(table, ids) y = MatMul(e, weight) }"
    result = onnxline.to_int8(attach(model_of(text, table=table, weight=weight)))
    formats = result.placement.formats()
    assert {"table", "weight", "e"} <= formats.keys()
    assert "ids" not in formats
    assert result.outputs["y"].sqnr_db > 25


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--data none.npz", "data: no file 'none.npz'"),
        ("--data wrong.npz", "'x' is float32[3, 4], expected float32[2, 4]"),
        ("--data other.npz", "the model has no input 'z'"),
        ("--data nan.npz", "'x' holds NaN (1 of 8 numbers)"),
        ("--keep Nope", "to-int8: keep: the model has no node or operator 'Nope'"),
        ("--keep G?mm*x", "to-int8: keep: the model has no node or operator 'G?mm*x'"),
        ("--keep tensor:nope", "'tensor:nope' matches no tensor"),
        ("--profile npu", "'npu' is not one of"),
        ("--samples 0", "samples"),
        ("--encodings none.encodings", "none.encodings"),
    ],
)
def test_mistakes(words: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    np.savez("wrong.npz", x=np.zeros((3, 4), np.float32))
    np.savez("other.npz", z=np.zeros((2, 4), np.float32))
    np.savez("nan.npz", x=np.array([[0, 0, 0, 0], [0, 0, 0, np.nan]], np.float32))
    printed = call("mlp.onnx", "-o", "out.onnx", *words.split(), code=2)
    assert said in " ".join(printed.split())
    assert not KEYS.search(printed)
    assert not Path("out.onnx").exists()


def test_places_that_cannot_be_written(folder: Path) -> None:
    (folder / "file").write_text("")
    model = folder / "mlp.onnx"
    for out, said in (
        (folder / "out", "expected a file that ends in .onnx"),
        (folder / "file" / "out.onnx", "is a file; expected a folder"),
        (model, "is the source itself"),
    ):
        assert said in call(model, "-o", out, code=2)
    assert "expected an ONNX file" in call(folder / "none.onnx", "-o", folder / "out.onnx", code=2)


def test_models_that_are_not_quantized(folder: Path) -> None:
    quantized = onnxline.to_int8(folder / "mlp.onnx", folder / "data").to_proto()
    with pytest.raises(UsageError, match="and 3 more in the model, expected a model that quantizes weights at most"):
        onnxline.to_int8(quantized)
    one = model_of("g (float[2, 4] x, float s) => (uint8[2, 4] y) { y = QuantizeLinear(x, s) }")
    with pytest.raises(UsageError, match=r"found QuantizeLinear of 'x' in the model"):
        onnxline.to_int8(attach(one))
    no_product = model_of("g (float[2, 4] x) => (float[2, 4] y) { r = Relu(x) y = Sqrt(r) }")
    with pytest.raises(UsageError, match="ort-cpu quantizes no tensor of the model"):
        onnxline.to_int8(attach(no_product))
    integers = model_of("g (int64[2] x) => (int64[2] y) { y = Add(x, x) }")
    with pytest.raises(UsageError, match="no tensor"):
        onnxline.to_int8(attach(integers))
    half = model_of("g (float16[2, 4] x) => (float16[2, 4] y) { y = MatMul(x, w) }", w=np.eye(4, dtype=np.float16))
    with pytest.raises(UsageError, match="only float32 is simulated"):
        onnxline.to_int8(attach(half))


def test_outputs_are_compared_with_those_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not with those of the model that a preparation made of it, within a tolerance."""
    text = "g (float[2, 4] x) => (float[2, 4] y) { y = MatMul(x, w) }"
    source, prepared = (model_of(text, w=np.eye(4, dtype=np.float32) * factor) for factor in (1, 2))
    monkeypatch.setattr("pipeline.quantsim.int8._prepare", lambda *_: (prepared, ()))
    assert onnxline.to_int8(source).outputs["y"].sqnr_db == pytest.approx(0, abs=0.2)


def test_a_step_that_fails_is_a_failed_check(folder: Path) -> None:
    """onnx's converter drops the batch of a Scan of opset 8, and with it an axis of the input."""
    body = "b (float[2] a) => (float[2] c) { c = Relu(a) }"
    text = f"g (float[1, 3, 2] x) => (float[1, 3, 2] y) {{ y = Scan<num_scan_inputs = 1, body = {body}>(, x) }}"
    onnx.save(attach(model_of(text, 8)), folder / "old.onnx")
    said = call(folder / "old.onnx", "-o", folder / "out.onnx", code=1)
    assert "to-int8: convert-opset failed: changes the model's input x" in said
    assert not (folder / "out.onnx").exists()


def test_a_result_that_onnxruntime_does_not_run_by_default_is_not_written(folder: Path) -> None:
    """Blocks of int8, for which onnxruntime makes a product that it has no kernel for."""
    blocks = {"op:*": {"weights": "int8/block2", "activations": "uint8"}}
    section = {"rules": blocks, "calibration": {"data": str(folder / "data")}, "encodings": "2.0.0"}
    by_quantsim(folder, folder / "mlp.onnx", section)
    with pytest.raises(CheckFailed, match="only without its optimizations"):
        onnxline.to_int8(folder / "mlp.onnx", encodings=folder / "out" / "model.encodings")


def test_arguments_are_checked(folder: Path) -> None:
    model = folder / "mlp.onnx"
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"samples": 0}, "samples is 0"),
        ({"profile": "npu"}, "profile is 'npu', expected one of ort-cpu"),
        ({"data": "a.npz", "feeds": [{}]}, "none next to data"),
        ({"seed": -1}, "seed is -1"),
        ({"data": 3}, "data is 3, expected a path"),
        ({"data": [None]}, "expected a path, or a list of paths"),
        ({"feeds": [3]}, "a mapping of arrays for each sample"),
        ({"timeout_s": -1}, "timeout_s is -1, expected seconds above 0"),
    )
    for options, said in wrong:
        with pytest.raises(UsageError, match=said):
            onnxline.to_int8(model, **options)
    with pytest.raises(PolicyError, match="keep is"):
        onnxline.to_int8(model, keep="Gemm")
    with pytest.raises(SourceError, match=r"feeds\[0\]: 'x' is float64"):
        onnxline.to_int8(model, feeds=[{"x": np.zeros((2, 4))}])


def test_a_recipe_is_told_where_quantization_stands(folder: Path) -> None:
    with pytest.raises(PolicyError, match="to-int8 is a command and no step"):
        onnxline.optimize(folder / "mlp.onnx", recipe=["to-int8"])


def test_it_needs_no_torch(folder: Path) -> None:
    program = "import sys; sys.modules.update(dict.fromkeys(('rich', 'torch'))); from pipeline.cli import main; main()"
    words = ["to-int8", str(folder / "mlp.onnx"), "-o", str(folder / "out.onnx"), "--data", str(folder / "data")]
    ended = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert "are quantized" in ended.stdout
