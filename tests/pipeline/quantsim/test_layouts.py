"""`quantsim.layouts`: a configuration alone gives checkpoints of GPTQ and AWQ, and a model with MatMulNBits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.numpy
import yaml
from typer.testing import CliRunner

from passes.rewrites.nibble_files import find_nibbles, read_nibbles
from passes.weights.detached import attach, read_model
from pipeline.cli import app
from pipeline.errors import CheckFailed, OnnxlineError
from pipeline.quantsim.encodings import encode
from pipeline.quantsim.files import write_layouts
from pipeline.quantsim.placement import place
from pipeline.quantsim.qdq import insert_qdq
from pipeline.quantsim.stages import Simulation
from tests.pipeline.quantsim.pictures_of_qdq import model_of, rule

LAYOUTS = ["gptq_v2", "awq", "matmul-nbits"]

PICTURE = """g (float[2, 64] x) => (float[2, 16] y) {
    h = MatMul(x, up_weight)
    r = Relu(h)
    y = MatMul(r, out_weight)
}"""


def simulate(folder: Path, outputs: int = 16, **quantsim: Any) -> str:
    draw = np.random.default_rng(0).standard_normal
    model = model_of(
        PICTURE.replace("16", str(outputs)),
        up_weight=draw((64, 32), np.float32),
        out_weight=draw((32, outputs), np.float32),
    )
    onnx.save(attach(model), folder / "net.onnx")
    settings = {
        "model": {"onnx": "net.onnx"},
        "passes": {"recipe": []},
        "runtime": {"backends": ["onnxruntime"]},
        "quantsim": {"profile": "weight-only", "rules": {"op:*": {"weights": "int4/block32"}}, **quantsim},
    }
    (folder / "net.yaml").write_text(yaml.safe_dump(settings))
    result = CliRunner().invoke(app, ["quantsim", str(folder / "net.yaml"), "--out", str(folder / "out")])
    if isinstance(result.exception, OnnxlineError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_the_weights_of_a_run_lie_in_every_layout_with_the_same_bits(tmp_path: Path) -> None:
    output = simulate(tmp_path, layouts=LAYOUTS)
    out = tmp_path / "out"
    wanted = find_nibbles(read_model(out / "model.qdq.onnx"))
    assert wanted.keys() == {"up_weight", "out_weight"}
    for layout in ("gptq_v2", "awq"):
        found = read_nibbles(out / layout / "model.safetensors")
        assert found.keys() == wanted.keys()
        for name, weight in wanted.items():
            for part in ("integers", "zero_points", "scales"):
                np.testing.assert_array_equal(getattr(found[name], part), getattr(weight, part))
        assert f"{layout}/model.safetensors has 2 weights of 4 bits, equal bit for bit when read back" in output
    operators = [node.op_type for node in onnx.load(out / "matmul-nbits" / "model.onnx").graph.node]
    assert operators == ["MatMulNBits", "Relu", "MatMulNBits"]
    simulate(tmp_path, rules={"op:*": {"weights": "int4/block8"}})
    assert not [file for file in out.rglob("*") if file.parent.name in LAYOUTS], "files of an earlier simulation"


def test_other_bits_than_those_that_were_written_are_a_failed_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(tmp_path)
    save = safetensors.numpy.save_file

    def lose_a_bit(tensors: dict[str, np.ndarray], path: Path, **options: Any) -> None:
        save({name: array ^ (name == "up_weight.qweight") if array.dtype == np.int32 else array
              for name, array in tensors.items()}, path, **options)  # fmt: skip

    monkeypatch.setattr(safetensors.numpy, "save_file", lose_a_bit)
    quantized = read_model(tmp_path / "out" / "model.qdq.onnx")
    with pytest.raises(CheckFailed, match="awq is read back with other bits"):
        write_layouts(quantized, ["awq"], tmp_path, {})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"layouts": ["gguf"]}, "layouts"),
        ({"layouts": ["awq"], "rules": {"op:*": {"weights": "int8/channel"}}}, "no rule gives a weight 4 bits"),
        ({"layouts": ["awq"], "shard_mib": 8}, "found layouts next to shard_mib"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_run(
    section: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(OnnxlineError, match=message):
        simulate(tmp_path, **section)
    assert not (tmp_path / "out").exists()


def test_a_weight_that_a_checkpoint_cannot_hold_is_refused_before_the_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calibrate(*_: object) -> None:
        raise AssertionError("ranges are measured")

    monkeypatch.setattr(Simulation, "find_ranges", calibrate)
    rules = {"op:*": {"weights": "int4/channel", "activations": "uint16"}}
    with pytest.raises(OnnxlineError, match="out_weight has 32 inputs and 20 outputs, expected multiples of 8"):
        simulate(tmp_path, outputs=20, layouts=["awq"], rules=rules)
    with pytest.raises(AssertionError, match="ranges are measured"):
        simulate(tmp_path, layouts=["awq"], rules=rules)


def test_a_table_that_is_the_output_projection_too_is_written_as_matmul_nbits(tmp_path: Path) -> None:
    text = """g (int64[2, 3] ids) => (float[2, 3, 48] y) {
        h = Gather(table, ids) up = MatMul(h, up_weight) t = Transpose <perm = [1, 0]> (table) y = MatMul(up, t)
    }"""
    draw = np.random.default_rng(0).standard_normal
    model = model_of(text, 21, table=draw((48, 32), np.float32), up_weight=draw((32, 32), np.float32))
    placement = place(model, [rule("op:*", "int4/block32", "float")])
    quantized = insert_qdq(model, encode(placement, {}, model))
    feeds = {"ids": np.arange(6).reshape(2, 3)}
    written = write_layouts(quantized, ["matmul-nbits", "gptq_v2"], tmp_path, feeds)
    assert written["matmul-nbits/model.onnx"].startswith("matmul-nbits/model.onnx has 2 weights of 4 bits, equal bit")
    nodes = [node.op_type for node in onnx.load(tmp_path / "matmul-nbits" / "model.onnx").graph.node]
    assert nodes.count("MatMulNBits") == 2
