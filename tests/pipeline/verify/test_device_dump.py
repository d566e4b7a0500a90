"""Tensors that a device dumped against onnxruntime: names, layouts, integers, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser
from typer.testing import CliRunner, Result

from passes.encodings.aimet import aimet_text
from passes.encodings.encoding import Encoding, Precision
from passes.weights.detached import read_model
from passes.weights.sessions import Session
from pipeline.cli import app
from pipeline.errors import UsageError

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
g (float[1, 3, 4, 5] x) => (float[1, 6, 4, 5] y) {
    ["conv/out:0"] = Conv(x, weight)
    y = Relu("conv/out:0")
}"""

VALUE = "conv/out:0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = parser.parse_model(TEXT.replace('["conv/out:0"]', "c").replace('"conv/out:0"', "c"))
    draw = np.random.default_rng(0)
    model.graph.initializer.append(numpy_helper.from_array(draw.normal(size=(6, 3, 1, 1)).astype(np.float32), "weight"))
    model.graph.node[0].output[0] = model.graph.node[1].input[0] = VALUE
    onnx.save(model, tmp_path / "net.onnx")
    np.savez(tmp_path / "in.npz", x=draw.normal(size=(1, 3, 4, 5)).astype(np.float32))
    (tmp_path / "dump").mkdir()
    return tmp_path


def values(folder: Path) -> dict[str, np.ndarray]:
    return Session.of(read_model(folder / "net.onnx"), [VALUE]).run(dict(np.load(folder / "in.npz")))


def compare(folder: Path, *words: str) -> Result:
    words = ("debug", "compare", "onnxruntime", str(folder / "dump"), str(folder / "net.onnx"), *words)
    return CliRunner().invoke(app, [*words, "--inputs", str(folder / "in.npz")])


def test_layouts_and_names_of_files(folder: Path) -> None:
    known = values(folder)
    np.save(folder / "dump" / "y.npy", np.moveaxis(known["y"], 1, -1))  # the shape says where the channels lie
    known[VALUE].tofile(folder / "dump" / "_conv_out_0.raw")
    np.save(folder / "dump" / "other.npy", np.zeros(3))
    result = compare(folder)
    assert result.exit_code == 0, result.output
    assert "agree on 2 values" in result.stdout
    assert "channels second and last" not in result.stderr
    assert "1 file that no value of the model has the name of: other.npy" in result.stderr
    np.moveaxis(known[VALUE], 1, -1).tofile(folder / "dump" / "_conv_out_0.raw")
    assert compare(folder).exit_code == 1
    assert compare(folder, "--layout", "nhwc").exit_code == 0


def test_folders_stand_for_the_slashes_of_a_name(folder: Path) -> None:
    (folder / "dump" / "conv").mkdir()
    np.save(folder / "dump" / "conv" / "out_0.npy", values(folder)[VALUE])
    result = compare(folder)
    assert (result.exit_code, "agree on 1 value" in result.stdout) == (0, True), result.output


def test_a_layout_is_taken_where_both_have_one_shape(folder: Path) -> None:
    model = onnx.load(folder / "net.onnx")
    model.graph.initializer[0].CopyFrom(
        numpy_helper.from_array(np.eye(4, 3, dtype=np.float32)[..., None, None], "weight")
    )
    for value in (*model.graph.input, *model.graph.output):
        for dim, size in zip(value.type.tensor_type.shape.dim, (1, 3 if value.name == "x" else 4, 4, 4), strict=True):
            dim.dim_value = size
    onnx.save(model, folder / "net.onnx")
    np.savez(folder / "in.npz", x=np.random.default_rng(0).normal(size=(1, 3, 4, 4)).astype(np.float32))
    np.moveaxis(values(folder)["y"], 1, -1).tofile(folder / "dump" / "y.raw")
    assert compare(folder).exit_code == 1
    assert compare(folder, "--layout", "nhwc").exit_code == 0
    (folder / "dump" / "y.raw").unlink()
    np.save(folder / "dump" / "y.npy", np.moveaxis(values(folder)["y"], 1, -1))
    result, said = compare(folder), "the shape of y.npy is the same with channels second and last"
    assert (result.exit_code, said in result.stderr) == (1, True)
    for layout, code in (("nhwc", 0), ("nchw", 1)):
        result = compare(folder, "--layout", layout)
        assert (result.exit_code, said in result.stderr) == (code, False)


@pytest.mark.parametrize("signed", [False, True])
def test_integers_with_their_encodings(folder: Path, signed: bool) -> None:
    known = values(folder)[VALUE]
    scale = np.float32(np.abs(known).max() / 127)
    precision = Precision(8, signed=signed, symmetric=signed)
    zero = np.array(0 if signed else 128)
    (folder / "net.encodings").write_text(
        aimet_text({VALUE: Encoding(precision, np.asarray(scale), zero)}, (), "1.0.0")
    )
    stored = (np.rint(known / scale) + (0 if signed else 128)).astype(np.int8 if signed else np.uint8)
    stored.tofile(folder / "dump" / "conv_out_0_native.raw")
    words = ("--encodings", str(folder / "net.encodings"), "--json")
    result = compare(folder, *words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["compared"] == 1
    (stored + 20).astype(stored.dtype).tofile(folder / "dump" / "conv_out_0_native.raw")
    assert compare(folder, *words).exit_code == 1
    refused = compare(folder)
    assert isinstance(refused.exception, UsageError) and "with --encodings those of integers" in str(refused.exception)


def test_what_does_not_fit_is_named(folder: Path) -> None:
    assert "found no file of a tensor" in str(compare(folder).exception)
    np.save(folder / "dump" / "y.npy", np.zeros(7, np.float32))
    assert "found 7 elements, and 'y' has [1, 6, 4, 5]" in str(compare(folder).exception)
    np.save(folder / "dump" / "y.npy", np.zeros((1, 6, 4, 5), np.uint8))
    assert "give its scale with --encodings" in str(compare(folder).exception)
    (folder / "dump" / "y.npy").write_bytes(b"no array")
    assert "y.npy: found no array of numbers" in str(compare(folder).exception)
    result = CliRunner().invoke(app, ["debug", "compare", "plan", "torch", "x.onnx", "--layout", "nhwc"])
    assert "give one as A or B" in str(result.exception)
