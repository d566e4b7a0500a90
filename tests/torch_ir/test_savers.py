"""Several who save to one path, and read from it, at the same time; and one that was killed in a save."""

from __future__ import annotations

import errno
import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as safetensors

from pipeline.torch_ir import IR
from pipeline.torch_ir.document import files


def holding(value: float) -> IR:
    """An IR of one constant of 20 KB."""
    return IR(constants={"k": torch.full((5000,), float(value))})


def test_savers_and_readers_of_one_path_do_not_harm_each_other(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    holding(-1).save(path)
    rounds = range(60)

    def saves(first: int) -> None:
        for value in rounds:
            holding(first + value).save(path)
            assert IR.load(path).constants["k"].unique().numel() == 1

    def reads(_: int) -> None:
        for _ in rounds:
            assert IR.load(path).constants["k"].unique().numel() == 1

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda task: task[0](task[1]), [(saves, 0), (saves, 1000), (reads, 0), (reads, 0)]))
    holding(7).save(path)
    assert IR.load(path).constants["k"][0] == 7
    assert len(list(tmp_path.iterdir())) == 2  # what the others have left goes with the next save


@pytest.mark.parametrize(
    "where, name",
    [(files, "read_tensors"), (torch.UntypedStorage, "from_file")],
    ids=["between the two files", "while safetensors opens the second"],
)
def test_a_save_while_a_reader_reads(where: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = tmp_path / "m.json", getattr(where, name)
    saves = [holding(3), holding(2)]

    def after_a_save(*args: Any, **kwargs: Any) -> Any:
        if saves:
            saves.pop().save(path)
        return read(*args, **kwargs)

    holding(1).save(path)
    monkeypatch.setattr(where, name, after_a_save)
    assert IR.load(path).constants["k"][0] == 3


def test_a_save_between_the_end_of_another_and_its_clearing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, flock = tmp_path / "m.json", fcntl.flock
    saves = [holding(2)]

    def after_a_save(folder: int, how: int) -> None:
        if how & fcntl.LOCK_EX and saves:
            saves.pop().save(path)
        flock(folder, how)

    monkeypatch.setattr(fcntl, "flock", after_a_save)
    holding(1).save(path)
    assert IR.load(path).constants["k"][0] == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(folder: int, how: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    for value in (1, 2):
        holding(value).save(tmp_path / "m.json")
    assert IR.load(tmp_path / "m.json").constants["k"][0] == 2
    assert len(list(tmp_path.iterdir())) == 3


def test_what_dead_savers_have_left_goes_with_the_first_save_that_is_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    holding(1).save(path)
    (first,) = (file.name for file in tmp_path.glob("*.safetensors"))
    left = {".m.json.77.77.tmp", ".m.json.77.tmp", f".{first}.77.77.tmp", "m.json.constants.0ab1.safetensors"}
    others = {".m.json.swp", ".n.json.77.77.tmp", ".tmpA1b2C3", "n.json.constants.0ab1.safetensors"}
    for name in left | others:
        (tmp_path / name).touch()
    another = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(another, fcntl.LOCK_SH)
    holding(2).save(path)
    assert {file.name for file in tmp_path.iterdir()} >= {first} | left | others
    os.close(another)
    holding(3).save(path)
    (last,) = (file.name for file in tmp_path.glob("m.json.constants.*"))
    assert {file.name for file in tmp_path.iterdir()} == {"m.json", last} | others


def test_a_file_of_constants_is_as_readable_as_its_json_and_safetensors_own(tmp_path: Path) -> None:
    holding(1).save(tmp_path / "m.json")
    (file,) = tmp_path.glob("*.safetensors")
    assert file.stat().st_mode == (tmp_path / "m.json").stat().st_mode
    assert file.read_bytes() == safetensors({"k": torch.ones(5000).view(torch.uint8)})
