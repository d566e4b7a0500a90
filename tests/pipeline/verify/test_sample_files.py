"""Samples as people have them: each kind of file and of loader gives the same arrays as numpy.savez."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.errors import SourceError
from pipeline.export.source import InputSpec
from pipeline.verify.user_inputs import input_files, read_samples

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

class Reader(CalibrationDataReader):
    def __init__(self): self.left = list(images.numpy())
    def get_next(self): return {"image": self.left.pop(0)[None]} if self.left else None
"""


@pytest.mark.parametrize("name", ["tensors", "batches", "labelled", "Reader"])
def test_loaders_of_tensors_and_tuples_and_readers(tmp_path: Path, name: str) -> None:
    (tmp_path / "own.py").write_text(LOADERS)
    check_images(read(f"{tmp_path / 'own.py'}:{name}", IMAGE))


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "text.npy", IDS)
    with pytest.raises(SourceError, match="holds memmap, and the model has 2 inputs; expected a mapping: input"):
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
