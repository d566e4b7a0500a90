"""Samples as people have them: each kind of file and of loader gives the same arrays as numpy.savez."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper, parser
from typer.testing import CliRunner, Result

from passes.encodings.aimet import AimetVersion, aimet_text
from passes.encodings.encoding import Encoding, Precision
from passes.weights.detached import read_model
from passes.weights.sessions import Session
from pipeline.cli import app
from pipeline.errors import SourceError, UsageError
from pipeline.export.source import InputSpec
from pipeline.verify.user_inputs import input_files, read_file, read_samples
from tests.support.files import forbid_reading

IMAGE = (InputSpec("image", (1, 3, 4), "float32", 0, 1),)
TEXT = (InputSpec("ids", (2, "length"), "int64", 0, 9), InputSpec("scale", (2,), "float32", 0, 1))

IMAGES = np.arange(36, dtype=np.float32).reshape(3, 1, 3, 4)
IDS, SCALE = np.arange(10, dtype=np.int64).reshape(2, 5), np.array([0.5, 2], np.float32)


def read(entry: Path | str, specs: tuple[InputSpec, ...]) -> list[dict[str, np.ndarray]]:
    return [sample for _, sample in read_samples([str(entry)], specs)]


def check_images(found: list[dict[str, np.ndarray]]) -> None:
    assert len(found) == 3
    for sample, expected in zip(found, IMAGES, strict=True):
        np.testing.assert_array_equal(sample["image"], expected)


def check_text(found: list[dict[str, np.ndarray]]) -> None:
    assert len(found) == 2
    for sample in found:
        np.testing.assert_array_equal(sample["ids"], IDS)
        np.testing.assert_array_equal(sample["scale"], SCALE)


@pytest.mark.parametrize("array", [IMAGES, IMAGES[:, 0]], ids=["of samples", "of batches"])
def test_an_array_is_cut_into_samples(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "images.npy", array)
    check_images(read(tmp_path / "images.npy", IMAGE))
    torch.save(torch.from_numpy(array), tmp_path / "images.pt")
    check_images(read(tmp_path / "images.pt", IMAGE))


def test_an_open_batch_takes_the_array_as_it_is(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", IMAGES[:, 0])
    (sample,) = read(tmp_path / "images.npy", (InputSpec("image", ("N", 3, 4), "float32", 0, 1),))
    np.testing.assert_array_equal(sample["image"], IMAGES[:, 0])


@pytest.mark.parametrize(
    "data",
    [
        [{"ids": torch.from_numpy(IDS), "scale": torch.from_numpy(SCALE)}] * 2,
        [(torch.from_numpy(IDS), torch.from_numpy(SCALE))] * 2,
        [(torch.from_numpy(IDS), torch.from_numpy(SCALE), torch.tensor(7))] * 2,
    ],
    ids=["mappings", "tuples", "tuples with a label"],
)
def test_torch_files_of_several_samples(tmp_path: Path, data: Any) -> None:
    torch.save(data, tmp_path / "text.pt")
    check_text(read(tmp_path / "text.pt", TEXT))


def test_a_folder_has_the_files_of_one_kind(tmp_path: Path) -> None:
    for index, image in enumerate(IMAGES):
        np.save(tmp_path / f"{index}.npy", image)
    (tmp_path / "note.md").write_text("not a sample")
    check_images(read(tmp_path, IMAGE))


def test_an_input_list_of_qnn(tmp_path: Path) -> None:
    """Native int64, and float32 as QNN has it by default; by names and by order."""
    (tmp_path / "raw").mkdir()
    IDS.tofile(tmp_path / "raw" / "ids.raw")
    IDS.astype(np.float32).tofile(tmp_path / "raw" / "ids32.raw")
    SCALE.tofile(tmp_path / "raw" / "scale.raw")
    lines = ["#logits", "% logits", "scale:=raw/scale.raw ids:=raw/ids.raw", "", "raw/ids32.raw raw/scale.raw"]
    (tmp_path / "input_list.txt").write_text("\n".join(lines))
    check_text(read(tmp_path / "input_list.txt", TEXT))


LOADERS = """
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset
from onnxruntime.quantization import CalibrationDataReader

images = torch.arange(36, dtype=torch.float32).reshape(3, 3, 4)

def tensors(): return DataLoader(images)
def batches(): return DataLoader(images, batch_size=3)
def labelled(): return DataLoader(TensorDataset(images, torch.arange(3)))
def named(): return DataLoader([{"label": index, "image": image} for index, image in enumerate(images)])

class Reader(CalibrationDataReader):
    def __init__(self): self.left = list(images.numpy())
    def get_next(self): return {"image": self.left.pop(0)[None]} if self.left else None
"""


@pytest.mark.parametrize("name", ["tensors", "batches", "labelled", "named", "Reader"])
def test_loaders_of_tensors_and_tuples_and_readers(tmp_path: Path, name: str) -> None:
    (tmp_path / "own.py").write_text(LOADERS)
    check_images(read(f"{tmp_path / 'own.py'}:{name}", IMAGE))


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "text.npy", IDS)
    with pytest.raises(SourceError, match="holds an array, and the model has 2 inputs; expected a mapping: input"):
        read(tmp_path / "text.npy", TEXT)
    torch.save({"net": torch.nn.Linear(1, 1)}, tmp_path / "model.pt")
    with pytest.raises(SourceError, match="torch reads no tensors from"):
        read(tmp_path / "model.pt", IMAGE)
    (tmp_path / "list.txt").write_text("ids:=gone.raw\n")
    with pytest.raises(SourceError, match=r"list.txt, line 1: no file 'gone.raw'"):
        input_files([str(tmp_path / "list.txt")])
    (tmp_path / "short.raw").write_bytes(b"12345")
    (tmp_path / "list.txt").write_text("scale:=short.raw ids:=short.raw\n")
    with pytest.raises(SourceError, match=r"short.raw has 5 bytes, expected those of"):
        read(tmp_path / "list.txt", TEXT)
    (tmp_path / "list.txt").write_text("words:=short.raw\n")
    with pytest.raises(SourceError, match="the model has no input 'words'; expected ids, scale"):
        read(tmp_path / "list.txt", TEXT)


@pytest.mark.parametrize("value", [torch.ones(1, 3, 4).to_sparse(), torch.ones(1, 3, 4, device="meta")])
def test_a_tensor_without_dense_numbers_is_refused(tmp_path: Path, value: torch.Tensor) -> None:
    torch.save({"image": value}, tmp_path / "images.pt")
    with pytest.raises(SourceError, match="'image' is sparse, nested, quantized or on meta, expected a dense"):
        read(tmp_path / "images.pt", IMAGE)


def test_records_of_the_inputs_size_are_no_numbers(tmp_path: Path) -> None:
    np.savez(tmp_path / "images.npz", image=np.zeros((1, 3, 4), [("field", np.float32)]))
    with pytest.raises(SourceError, match=r"'image' is \[\('field', '<f4'\)\]\[1, 3, 4\], expected float32"):
        read(tmp_path / "images.npz", IMAGE)


@pytest.mark.parametrize("name", ["x.npz", "x.npy", "x.pt"])
def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    with forbid_reading(file), pytest.raises(SourceError, match=rf"--data: .*{name} cannot be read: Permission denied"):
        list(read_file(file, [], "--data"))


def test_damaged_files_of_numpy_are_named(tmp_path: Path) -> None:
    """By the tokenizer of headers, and by zlib."""
    (tmp_path / "image.npy").write_bytes(b"\x93NUMPY\x01\x00\x10\x00{'descr': ('<f4'")
    with pytest.raises(SourceError, match=r"is no whole \.npy file"):
        read(tmp_path / "image.npy", IMAGE)
    (tmp_path / "image.npy").write_text("no array")
    with pytest.raises(SourceError, match="its beginning is not numpy's, or it holds Python objects") as caught:
        read(tmp_path / "image.npy", IMAGE)
    assert "allow_pickle" not in str(caught.value)
    np.savez_compressed(tmp_path / "image.npz", image=IMAGES)
    content = bytearray((tmp_path / "image.npz").read_bytes())
    content[60:90] = b"\xff" * 30
    (tmp_path / "image.npz").write_bytes(content)
    with pytest.raises(SourceError, match=r"is no whole \.npz file"):
        read(tmp_path / "image.npz", IMAGE)


# Tensors that a device dumped against onnxruntime: names, layouts, integers, and what does not fit.

DUMPED = """<ir_version: 10, opset_import: ["" : 21]>
g (float[1, 3, 4, 5] x) => (float[1, 6, 4, 5] y) {
    ["conv/out:0"] = Conv(x, weight)
    y = Relu("conv/out:0")
}"""

VALUE = "conv/out:0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = parser.parse_model(DUMPED.replace('["conv/out:0"]', "c").replace('"conv/out:0"', "c"))
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
    assert "y.npy does not say" not in result.stderr
    assert "1 file that no value of the model has the name of: other.npy" in result.stderr
    np.moveaxis(known[VALUE], 1, -1).tofile(folder / "dump" / "_conv_out_0.raw")
    result = compare(folder)
    assert result.exit_code == 1 and "does not say whether its channels are second or last" in result.stderr
    result = compare(folder, "--layout", "nhwc")
    assert result.exit_code == 0 and "does not say" not in result.stderr


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
    result, said = compare(folder), "y.npy does not say whether its channels are second or last"
    assert (result.exit_code, said in result.stderr) == (1, True)
    for layout, code in (("nhwc", 0), ("nchw", 1)):
        result = compare(folder, "--layout", layout)
        assert (result.exit_code, said in result.stderr) == (code, False)


@pytest.mark.parametrize("counted", [False, True], ids=["around 0", "from 0"])
@pytest.mark.parametrize(
    ("version", "signed", "symmetric"),
    [("1.0.0", False, False), ("1.0.0", True, True), ("2.0.0", True, True), ("2.0.0", True, False)],
)
def test_integers_with_their_encodings(
    folder: Path, version: AimetVersion, signed: bool, symmetric: bool, counted: bool
) -> None:
    """Around 0 or from 0: as the format has them, as the file says, as the option says; never by a guess."""
    known = values(folder)[VALUE]
    scale, zero = np.float32(np.abs(known).max() / 100), 128 * (not signed) + 20 * (not symmetric)
    encoding = Encoding(Precision(8, signed, symmetric), np.asarray(scale), np.array(zero))
    (folder / "net.encodings").write_text(aimet_text({VALUE: encoding}, (), version))
    stored = np.rint(known / scale).astype(np.int64) + zero
    stored = (stored + 128 * signed).astype(np.uint8) if counted or not signed else stored.astype(np.int8)
    stored.tofile(folder / "dump" / "conv_out_0_native.raw")
    words = ("--encodings", str(folder / "net.encodings"), "--json")
    found = compare(folder, *words)
    if version == "1.0.0" and symmetric:
        assert isinstance(found.exception, UsageError)
        assert "integers of the symmetric format int8, which the encodings do not say" in str(found.exception)
        assert compare(folder, *words, "--integers", "signed" if counted else "unsigned").exit_code == 1
        words = (*words, "--integers", "unsigned" if counted else "signed")
        found = compare(folder, *words)
    assert found.exit_code == int(signed and counted and version == "2.0.0"), found.output
    assert json.loads(found.stdout)["compared"] == 1
    (stored + 20).astype(stored.dtype).tofile(folder / "dump" / "conv_out_0_native.raw")
    assert compare(folder, *words).exit_code == 1
    refused = compare(folder)
    assert isinstance(refused.exception, UsageError) and "with --encodings those of integers" in str(refused.exception)


def test_a_symmetric_offset_of_0_counts_from_0(folder: Path) -> None:
    """As AIMET writes what is never negative where symmetric formats have no sign."""
    known = values(folder)["y"]
    scale = float(known.max() / 200)
    row = {"bw": 8, "dtype": "INT", "enc_type": "PER_TENSOR", "is_sym": True, "name": "y", "offset": [0]}
    data = {"version": "1.0.0", "activation_encodings": [{**row, "scale": [scale]}], "param_encodings": []}
    (folder / "net.encodings").write_text(json.dumps(data))
    np.rint(known / np.float32(scale)).astype(np.uint8).tofile(folder / "dump" / "y.raw")
    found = compare(folder, "--encodings", str(folder / "net.encodings"))
    assert found.exit_code == 0, found.output


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
