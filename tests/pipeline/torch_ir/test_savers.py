"""Several who save to one path, and read from it, at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as safetensors

from pipeline.torch_ir import IR, files


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


def test_a_save_while_a_reader_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = tmp_path / "m.json", files._read_tensors
    saves = [holding(3), holding(2)]

    def after_a_save(*args: Any) -> Any:
        if saves:
            saves.pop().save(path)
        return read(*args)

    holding(1).save(path)
    monkeypatch.setattr(files, "_read_tensors", after_a_save)
    assert IR.load(path).constants["k"][0] == 3


def test_a_save_removes_the_constants_of_what_it_replaces_and_nothing_else(tmp_path: Path) -> None:
    others = {"n.json.constants.0ab1.safetensors", "m.json.constants.0ab1.safetensors", ".m.json.swp"}
    for name in others:
        (tmp_path / name).touch()
    for value in (1, 2, 2):
        holding(value).save(tmp_path / "m.json")
    assert IR.load(tmp_path / "m.json").constants["k"][0] == 2
    assert len({file.name for file in tmp_path.iterdir()} - others) == 2
    assert others <= {file.name for file in tmp_path.iterdir()}


def test_a_file_of_constants_is_as_readable_as_its_json_and_safetensors_own(tmp_path: Path) -> None:
    holding(1).save(tmp_path / "m.json")
    (file,) = tmp_path.glob("*.safetensors")
    assert file.stat().st_mode == (tmp_path / "m.json").stat().st_mode
    assert file.read_bytes() == safetensors({"k": torch.ones(5000).view(torch.uint8)})
