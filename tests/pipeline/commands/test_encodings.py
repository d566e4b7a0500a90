"""`onnxline encodings`, `optimize --encodings`, `passes.encodings` and `quantsim.encodings_from`: files in and out."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from passes.encodings.aimet import AimetVersion, from_aimet, read_aimet, to_aimet
from passes.encodings.encoding import is_same_encoding
from passes.encodings.from_qdq import read_qdq
from passes.errors import OnnxlineError, UsageError
from passes.weights.detached import attach, read_model
from pipeline.cli import app
from pipeline.config.quantsim import parse_precision
from pipeline.quantsim.encodings import encode, encode_weight
from pipeline.quantsim.encodings_file import encodings_text
from pipeline.quantsim.placement import place
from pipeline.quantsim.qdq import insert_qdq
from tests.pipeline.commands.quantized_files import FORMATS, mlp_file, placement_rule
from tests.support.onnx_models import detached, model_of


def call(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


@pytest.mark.parametrize("formats", FORMATS)
def test_a_quantized_model_and_its_encodings_are_one_thing(tmp_path: Path, formats: tuple[str, str]) -> None:
    source = mlp_file(tmp_path)
    model = read_model(source)
    placement = place(model, [placement_rule(*formats)])
    known = encode(placement, {placed.site.group: (-1.0, 3.0) for placed in placement.sites}, model)
    (tmp_path / "given.encodings").write_text(json.dumps(to_aimet(known, {"first", "second", "bias"}, "2.0.0")))
    call("encodings", source, "--apply", tmp_path / "given.encodings", "-o", tmp_path / "model.qdq.onnx")
    written = onnx.load(tmp_path / "model.qdq.onnx")
    assert written.graph.node == attach(insert_qdq(model, known)).graph.node
    call("encodings", tmp_path / "model.qdq.onnx", "--of", source, "-o", tmp_path / "read.encodings")
    found, version = read_aimet(tmp_path / "read.encodings")
    assert version == "2.0.0"
    assert found.keys() == known.keys()
    if "bias" in known:  # the format of the file says of each scale of its own that it is one for a channel
        np.testing.assert_array_equal(found.pop("bias").scale, known.pop("bias").scale)
    assert [name for name in known if not is_same_encoding(known[name], found[name])] == []


def test_the_encodings_of_onnxruntime(tmp_path: Path) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Samples(CalibrationDataReader):
        def __init__(self) -> None:
            draw = np.random.default_rng(0)
            self.left = iter([{"x": draw.standard_normal((2, 4)).astype(np.float32)} for _ in range(3)])

        def get_next(self) -> dict[str, np.ndarray] | None:  # type: ignore[override]
            return next(self.left, None)

    source = mlp_file(tmp_path)
    kinds = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, "per_channel": True}
    quantize_static(source, tmp_path / "q.onnx", Samples(), quant_format=QuantFormat.QDQ, **kinds)  # type: ignore[arg-type]
    call("encodings", tmp_path / "q.onnx", "--of", source, "-o", tmp_path / "q.encodings")
    found = from_aimet(json.loads((tmp_path / "q.encodings").read_text()))
    assert {"x", "first", "bias", "second", "y"} <= found.keys()
    assert str(found["first"].precision).startswith("int8/channel")
    assert found["first"].axis == 1


@pytest.mark.parametrize("version", ["0.6.1", "1.0.0", "2.0.0", "2.1.0"])
@pytest.mark.parametrize("axis", [0, 1, -1, -2])
@pytest.mark.parametrize(
    ("product", "channel"), [("MatMul (x, {})", 1), ("Gemm <transB = 1> (x, {})", 0), ("MatMul ({}, x)", 0)]
)
def test_scales_along_either_axis_of_a_square_weight(
    tmp_path: Path, product: str, channel: int, axis: int, version: str
) -> None:
    weight = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    scale = np.arange(1, 5, dtype=np.float32) / 100
    text = f"q = QuantizeLinear <axis = {axis}> (w, s, z) d = DequantizeLinear <axis = {axis}> (q, s, z)"
    ends = "g (float[4, 4] x) => (float[4, 4] y)"
    quantized = model_of(
        f"{ends} {{ {text} y = {product.format('d')} }}", 21, w=weight, s=scale, z=np.zeros(4, np.int8)
    )
    onnx.save(quantized, tmp_path / "q.onnx")
    onnx.save(model_of(f"{ends} {{ y = {product.format('w')} }}", w=weight), tmp_path / "float.onnx")
    for options in ((), ("--of", tmp_path / "float.onnx")):
        command = ("encodings", tmp_path / "q.onnx", *options, "--version", version, "-o", tmp_path / "e.encodings")
        if axis % 2 != channel and version in ("0.6.1", "1.0.0"):
            with pytest.raises(UsageError, match=r"'w' has scales along other axes .*; take 2\.0\.0 or later"):
                call(*command)
            continue
        call(*command)
        call("encodings", tmp_path / "float.onnx", "--apply", tmp_path / "e.encodings", "-o", tmp_path / "again.onnx")
        found = read_qdq(read_model(tmp_path / "again.onnx"))["w"]
        assert found.axis == axis % 2
        np.testing.assert_array_equal(found.scale, scale)


def test_a_simulation_leaves_out_scales_along_an_axis_that_the_version_cannot_say() -> None:
    weight = np.eye(4, dtype=np.float32)
    model = detached(model_of("g (float[4, 4] x) => (float[4, 4] y) { y = MatMul (x, w) }", w=weight))
    encoding = encode_weight(weight, parse_precision("int8/channel") or pytest.fail("no format"), 0)
    text, (note,) = encodings_text(model, {"w": encoding}, "1.0.0")
    assert not from_aimet(json.loads(text))
    assert note.startswith("leaves 1 tensor of int8")
    text, notes = encodings_text(model, {"w": encoding}, "2.0.0")
    assert (from_aimet(json.loads(text))["w"].axis, notes) == (0, ())


def test_merged_encodings_along_an_axis_that_the_version_cannot_say_are_refused(tmp_path: Path) -> None:
    """The file of a merged model has the version of the first."""
    weight, scale, zero = np.eye(4, dtype=np.float32), np.full(4, 0.01, np.float32), np.zeros(4, np.int8)
    ends, product = "g (float[4, 4] x) => (float[4, 4] y)", "y = MatMul (x, {})"
    onnx.save(model_of(f"{ends} {{ {product.format('w')} }}", w=weight), tmp_path / "float.onnx")
    for axis, version in ((1, "1.0.0"), (0, "2.0.0")):
        text = f"q = QuantizeLinear <axis = {axis}> (w, s, z) d = DequantizeLinear <axis = {axis}> (q, s, z)"
        onnx.save(
            model_of(f"{ends} {{ {text} {product.format('d')} }}", w=weight, s=scale, z=zero), tmp_path / "q.onnx"
        )
        call("encodings", tmp_path / "q.onnx", "--version", version, "-o", tmp_path / f"{axis}.encodings")
    models = (tmp_path / "float.onnx", tmp_path / "float.onnx", "--map", "y=x", "-o", tmp_path / "m.onnx")
    given = [("--encodings", tmp_path / f"{axis}.encodings") for axis in (1, 0)]
    with pytest.raises(UsageError, match=r"'w_2' has scales along other axes .*; take 2\.0\.0 or later"):
        call("merge", *models, *given[0], *given[1])
    call("merge", *models, *given[1], *given[0])


@pytest.mark.parametrize("version", ["0.6.1", "1.0.0", "2.0.0"])
def test_scales_of_a_table_need_a_version_that_says_their_axis(tmp_path: Path, version: AimetVersion) -> None:
    """AIMET has channels of Conv, ConvTranspose, Gemm and MatMul alone, so older files have none of a table."""
    ends, step = "g (int64[2] i) => (float[2, 4] y)", "Linear <axis = 0>"
    table, scale = np.ones((4, 4), np.float32), np.arange(1, 5, dtype=np.float32) / 100
    text = f"q = Quantize{step} (w, s, z) d = Dequantize{step} (q, s, z) y = Gather (d, i)"
    onnx.save(model_of(f"{ends} {{ {text} }}", 21, w=table, s=scale, z=np.zeros(4, np.int8)), tmp_path / "q.onnx")
    onnx.save(model_of(f"{ends} {{ y = Gather (w, i) }}", w=table), tmp_path / "f.onnx")
    known, model = read_qdq(read_model(tmp_path / "q.onnx")), read_model(tmp_path / "f.onnx")
    written, notes = encodings_text(model, known, version)
    for options in ((), ("--of", tmp_path / "f.onnx")):
        command = ("encodings", tmp_path / "q.onnx", *options, "--version", version, "-o", tmp_path / "e.encodings")
        if version == "2.0.0":
            call(*command)
            call("encodings", tmp_path / "f.onnx", "--apply", tmp_path / "e.encodings", "-o", tmp_path / "again.onnx")
            np.testing.assert_array_equal(read_qdq(read_model(tmp_path / "again.onnx"))["w"].scale, scale)
            assert '"w"' in written and not notes
        else:
            with pytest.raises(UsageError, match=r"'w' has scales along other axes .*; take 2\.0\.0 or later"):
                call(*command)
            assert '"w"' not in written and "leaves 1 tensor of int8/channel out" in notes[0]


@pytest.mark.parametrize(("axis", "version"), [(0, "1.0.0"), (1, None), (-1, None), (-2, "1.0.0")])
def test_blocks_along_either_axis_of_a_square_weight(tmp_path: Path, axis: int, version: str | None) -> None:
    weight = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    scale = np.arange(1, 9, dtype=np.float32).reshape((2, 4) if axis % 2 == 0 else (4, 2)) / 100
    block = f"<axis = {axis}, block_size = 2>"
    text = f"q = QuantizeLinear {block} (w, s, z) d = DequantizeLinear {block} (q, s, z) y = MatMul (x, d)"
    zeros = np.zeros(scale.shape, np.int8)
    quantized = model_of(f"g (float[4, 4] x) => (float[4, 4] y) {{ {text} }}", 21, w=weight, s=scale, z=zeros)
    onnx.save(quantized, tmp_path / "q.onnx")
    onnx.save(model_of("g (float[4, 4] x) => (float[4, 4] y) { y = MatMul (x, w) }", 21, w=weight), tmp_path / "f.onnx")
    command = ("encodings", tmp_path / "q.onnx", "-o", tmp_path / "e.encodings", "--version")
    if version is None:
        with pytest.raises(UsageError, match="'w' has scales along other axes"):
            call(*command, "1.0.0")
    call(*command, version or "2.0.0")
    call("encodings", tmp_path / "f.onnx", "--apply", tmp_path / "e.encodings", "-o", tmp_path / "again.onnx")
    found = read_qdq(read_model(tmp_path / "again.onnx"))["w"]
    assert found.axis == axis % 2
    np.testing.assert_array_equal(found.scale, scale)


def test_what_holds_no_encodings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no QuantizeLinear or DequantizeLinear"):
        call("encodings", mlp_file(tmp_path), "-o", tmp_path / "x.encodings")
    with pytest.raises(UsageError, match="No such file"):
        call("encodings", mlp_file(tmp_path), "--apply", tmp_path / "none.encodings", "-o", tmp_path / "q.onnx")


def quantize_mlp(folder: Path) -> Path:
    """A file of encodings of the small model, for all of its tensors."""
    model = read_model(mlp_file(folder))
    placement = place(model, [placement_rule("int8/channel", "uint8")])
    known = encode(placement, {placed.site.group: (-1.0, 3.0) for placed in placement.sites}, model)
    path = folder / "mlp.encodings"
    path.write_text(json.dumps(to_aimet(known, {"first", "second", "bias"}, "1.0.0")))
    return path


def test_optimize_writes_the_encodings_beside_the_result(tmp_path: Path) -> None:
    given = quantize_mlp(tmp_path)
    printed = call("optimize", tmp_path / "mlp.onnx", "-o", tmp_path / "out.onnx", "--encodings", given)
    assert "encodings: 6 tensors of the final model; of the source's, 1 are gone" in printed.replace("\n", " ")
    assert "gone: t (by onnxsim): its Reshape is gone" in printed
    read, version = read_aimet(tmp_path / "out.encodings")
    assert version == "1.0.0"
    assert read.keys() == read_aimet(given)[0].keys() - {"t"}


def test_a_run_carries_the_encodings_that_its_configuration_names(tmp_path: Path) -> None:
    quantize_mlp(tmp_path)
    config = tmp_path / "mlp.yaml"
    config.write_text("model: {onnx: mlp.onnx}\npasses: {recipe: [default], encodings: mlp.encodings}\n")
    call("run", config, "--out", tmp_path / "out")
    given, carried = (read_aimet(tmp_path / name)[0] for name in ("mlp.encodings", "out/carried.encodings"))
    assert carried.keys() == given.keys()  # the passes of onnxoptimizer leave a Reshape to the same shape
    report = json.loads((tmp_path / "out" / "carried.json").read_text())
    assert (report["format_version"], report["lost"]) == (1, [])
    config.write_text("model: {onnx: mlp.onnx}\npasses: {recipe: [default, onnxsim]}\n")
    call("run", config, "--out", tmp_path / "out")
    assert list((tmp_path / "out").glob("carried.*")) == [], "encodings of an earlier run beside the model of this one"


def simulate(folder: Path, encodings: Path) -> None:
    setting = f"quantsim.encodings_from={encodings}"
    call("quantsim", folder / "mlp.onnx", "--recipe", "", "--out", folder / "out", "--set", setting)


def test_scales_from_a_file_in_place_of_calibration(tmp_path: Path) -> None:
    given = quantize_mlp(tmp_path)
    simulate(tmp_path, given)
    found, known = (read_aimet(path)[0] for path in (tmp_path / "out" / "model.encodings", given))
    assert found.keys() == known.keys() - {"t"}  # a Reshape, after which AIMET has no quantizer
    assert all(is_same_encoding(found[name], known[name]) for name in found)
    bias = read_qdq(read_model(tmp_path / "out" / "model.qdq.onnx"))["bias"]  # no file up to 1.0.0 has it
    np.testing.assert_allclose(bias.scale, known["x"].scale * known["first"].scale, rtol=1e-6)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"name": "h"', '"name": "hh"', r"1 of 7 are for tensors .*: 'hh'; did you mean 'h'"),
        (None, "y", r"encodings_from: 1 of 8 tensors that are to be quantized have no encoding in the file: 'y'"),
    ],
)
def test_names_that_do_not_fit_are_errors(tmp_path: Path, old: str | None, new: str, message: str) -> None:
    given = quantize_mlp(tmp_path)
    data = json.loads(given.read_text())
    if old is None:
        rows = data["activation_encodings"]
        data["activation_encodings"] = [row for row in rows if row["name"] != new]
    text = json.dumps(data)
    given.write_text(text if old is None else text.replace(old, new))
    with pytest.raises(OnnxlineError, match=message) as error:
        simulate(tmp_path, given)
    assert error.value.exit_code == 2


def quantized_mlp(folder: Path, weights: str, activations: str) -> Path:
    """The float model; the quantized one lies next to it as q.onnx."""
    source = mlp_file(folder)
    model = read_model(source)
    placement = place(model, [placement_rule(weights, activations)])
    known = encode(placement, {placed.site.group: (-1.0, 3.0) for placed in placement.sites}, model)
    onnx.save(attach(insert_qdq(model, known)), folder / "q.onnx")
    return source


def test_the_calibration_cache_of_tensorrt(tmp_path: Path) -> None:
    source = quantized_mlp(tmp_path, "int8/channel", "uint8")
    call("encodings", tmp_path / "q.onnx", "--of", source, "--to", "tensorrt", "-o", tmp_path / "net.cache")
    head, *lines = (tmp_path / "net.cache").read_text().splitlines()
    assert head.startswith("TRT-") and head.endswith("-EntropyCalibration2")
    scales = {name: struct.unpack(">f", bytes.fromhex(bits))[0] for name, bits in (line.split(": ") for line in lines)}
    assert "first" not in scales
    assert scales["x"] == pytest.approx(3 / 127, rel=0.01)  # -1 to 3 becomes -3 to 3
    quantized_mlp(tmp_path, "int8/channel", "uint16")
    with pytest.raises(UsageError, match="is uint16; TensorRT's cache holds 8 bits alone"):
        call("encodings", tmp_path / "q.onnx", "--of", source, "--to", "tensorrt", "-o", tmp_path / "net.cache")


def test_the_recipe_of_ai_edge_quantizer(tmp_path: Path) -> None:
    source = quantized_mlp(tmp_path, "int4/channel", "uint8")
    call("encodings", tmp_path / "q.onnx", "--of", source, "--to", "ai-edge", "-o", tmp_path / "recipe.json")
    [row] = json.loads((tmp_path / "recipe.json").read_text())
    assert (row["regex"], row["operation"]) == (".*", "FULLY_CONNECTED")
    assert row["op_config"] == {
        "weight_tensor_config": {"num_bits": 4, "symmetric": True, "granularity": "CHANNELWISE", "dtype": "INT"},
        "activation_tensor_config": {"num_bits": 8, "symmetric": False, "granularity": "TENSORWISE", "dtype": "INT"},
        "compute_precision": "INTEGER",
        "explicit_dequantize": False,
        "skip_checks": False,
        "min_weight_elements": 0,
    }
    with pytest.raises(UsageError, match="name it with --of"):
        call("encodings", tmp_path / "q.onnx", "--to", "ai-edge", "-o", tmp_path / "recipe.json")
    quantized_mlp(tmp_path, "uint4/channel", "uint8")
    with pytest.raises(UsageError, match="takes symmetric weights of 4 or 8 bits"):
        call("encodings", tmp_path / "q.onnx", "--of", source, "--to", "ai-edge", "-o", tmp_path / "recipe.json")
    quantized_mlp(tmp_path, "int8/channel", "uint4")
    with pytest.raises(UsageError, match="has uint4; ai-edge-quantizer takes 8 or 16 bits"):
        call("encodings", tmp_path / "q.onnx", "--of", source, "--to", "ai-edge", "-o", tmp_path / "recipe.json")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--apply x.encodings --to tensorrt", "found --to tensorrt with --apply"),
        ("--apply x.gguf --of x.onnx", "found --of with --apply"),
        ("--apply x.encodings --version 1.0.0", "found --version with --apply, which writes no file of AIMET's"),
        ("--to awq --of x.onnx", "found --of with --to awq"),
        ("--to tensorrt --version 1.0.0", "found --version with --to tensorrt"),
    ],
)
def test_an_option_without_effect_is_refused(tmp_path: Path, options: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        call("encodings", tmp_path / "x.onnx", *options.split(), "-o", tmp_path / "out")
