"""What a batch does again, and what it does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from passes.advisories import AuditFinding, table_of, table_text
from passes.recipe.recipe import library_versions
from pipeline.batch import Row, read_configs, run_batch
from pipeline.errors import UsageError
from pipeline.jobs import Job, JobProgress, LocalProcesses, Outcome
from pipeline.jobs.job import perform


class InThisProcess:
    """Does jobs one after the other; and something else after each."""

    def __init__(self, after=lambda: None) -> None:
        self._after = after

    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        for job in jobs:
            yield perform(job)
            self._after()


@pytest.fixture
def batch(small_config, tmp_path: Path):
    """Three configurations, the last of which is wrong; returns what runs them."""
    small_config("a.yaml")
    small_config("b.yaml")
    small_config("c.yaml", passes={"recipe": ["eliminate_identity"], "keep": ["qkv"]})

    def run(pattern: str = "*.yaml", again: bool = False, after=lambda: None) -> tuple[Row, ...]:
        planned = read_configs([str(tmp_path / pattern)])
        return run_batch(planned, tmp_path / "out", InThisProcess(after), again=again)

    return run


def states(rows: tuple[Row, ...]) -> list[str]:
    return [f"{row.name} {row.state}" + (" before" if row.known else "") for row in rows]


def test_only_what_is_not_done_is_run(batch, small_config) -> None:
    assert states(batch()) == ["a done", "b done", "c mistake"]
    assert states(batch()) == ["a done before", "b done before", "c mistake"]
    small_config("c.yaml")
    assert states(batch()) == ["a done before", "b done before", "c done"]
    assert states(batch(again=True)) == ["a done", "b done", "c done"]


def unsafe_table(folder: Path, *findings: AuditFinding) -> None:
    table = table_of("onnxoptimizer", library_versions()["onnxoptimizer"], ["eliminate_identity"], findings, {}, {})
    folder.mkdir(exist_ok=True)
    (folder / "mine.txt").write_text(table_text(table), encoding="utf-8")


def test_a_table_of_an_audit_that_was_replaced(batch, small_config, tmp_path: Path) -> None:
    """It is another job, and in the run the passes are not taken from before."""
    small_config("b.yaml", passes={"recipe": ["eliminate_identity"], "skip": ["unsafe:tables"]})
    unsafe_table(tmp_path / "tables")
    assert [(row.state, row.found["nodes_after"]) for row in batch("b.yaml")] == [("done", 2)]
    unsafe_table(tmp_path / "tables", AuditFinding("eliminate_identity", "wrong", "models/mine"))
    assert [(row.state, row.found["nodes_after"]) for row in batch("b.yaml")] == [("done", 3)]


def remove_artifacts(folder: Path) -> None:
    shutil.rmtree(folder / "out/b")


def run_by_hand(folder: Path) -> None:
    (folder / "out/b/report.json").write_text("{}")


def touch_the_model(folder: Path) -> None:
    (folder / "other.onnx").touch()


@pytest.mark.parametrize("change", [remove_artifacts, run_by_hand, touch_the_model])
def test_what_makes_a_run_count_no_longer(change, batch, small_config, tmp_path: Path) -> None:
    shutil.copy(tmp_path / "small.onnx", tmp_path / "other.onnx")
    small_config("b.yaml", model={"onnx": "other.onnx"})
    assert states(batch("b.yaml")) == ["b done"]
    change(tmp_path)
    assert states(batch("b.yaml")) == ["b done"]


FACTORY = """
from sizes import WIDTH
import torch
def make():
    return torch.nn.Linear(WIDTH, WIDTH), (torch.ones(1, WIDTH),)
"""


def test_a_changed_import_of_a_factory(batch, small_config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies beside neither the configuration nor the factory, and is imported by what the factory imports."""
    folder = tmp_path / "lib"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    (tmp_path / "make.py").write_text(FACTORY)
    (tmp_path / "sizes.py").write_text("from batch_test_widths import *\n")
    (folder / "batch_test_widths.py").write_text("WIDTH = 4\n")
    small_config("b.yaml", model={"factory": "make.py:make"}, passes={"recipe": []}, verify={"draws": 1})
    assert states(batch("b.yaml")) == ["b done"]
    assert states(batch("b.yaml")) == ["b done before"]
    (folder / "batch_test_widths.py").write_text("WIDTH = 3 + 1\n")
    assert states(batch("b.yaml")) == ["b done"]


def test_files_that_stayed_on_the_disk_of_a_node(batch, tmp_path: Path) -> None:
    rows = batch("a.yaml", after=lambda: shutil.rmtree(tmp_path / "out/a"))
    assert states(rows) == ["a mistake"]
    assert "its files are not here; nodes need a disk that they share" in rows[0].why


def test_a_node_that_has_not_the_model(batch, tmp_path: Path) -> None:
    rows = batch("[ab].yaml", after=lambda: (tmp_path / "small.onnx").unlink(missing_ok=True))
    assert states(rows) == ["a done", "b mistake"]
    assert "small.onnx on" in rows[1].why
    assert "every node needs the same files at the same paths" in rows[1].why


# Runs in parts: a job for each part, and one for what is done with all of them.


@pytest.fixture
def in_parts(small_config, batch, tmp_path: Path):
    """Writes a configuration of two parts, and runs it with or without a job for each; gives the row, and what ran."""

    def run(again: bool = False, whole: bool = False, skip: str = "", **parts: object) -> tuple[Row, list[str]]:
        own = {"first": {"passes": {"skip": [skip]}}} if skip else {}
        models = {"first": {"onnx": "small.onnx"}, "second": {"onnx": "small.onnx"}, **parts}
        path = small_config("p.yaml", model={"parts": models}, parts=own)
        executor = LocalProcesses(1) if whole else InThisProcess()
        told: list[JobProgress] = []
        (row,) = run_batch(read_configs([str(path)]), tmp_path / "out", executor, told.append, again=again)
        return row, [one.outcome.key.removeprefix("p/parts/") for one in told if not one.known]

    return run


def test_each_part_is_a_job(in_parts, tmp_path: Path) -> None:
    row, ran = in_parts()
    assert ran == ["first", "second", "p"]
    assert [(part.name, part.state, part.attempts) for part in row.parts] == [
        ("p/parts/first", "done", 1),
        ("p/parts/second", "done", 1),
    ]
    assert row.found["parts"] == {part.name.rpartition("/")[2]: part.found for part in row.parts}
    report = json.loads((tmp_path / "out/p/report.json").read_text())
    stages = ("export", "passes", "runtime")
    assert report["cached"] == [f"{part}: {stage}" for part in ("first", "second") for stage in stages]
    row, ran = in_parts()
    assert row.known and ran == []
    assert in_parts(again=True)[1] == ["first", "second", "p"]


def test_only_the_part_that_changed_is_done_again(in_parts, tmp_path: Path) -> None:
    in_parts()
    row, ran = in_parts(skip="eliminate_identity")
    assert ran == ["first", "p"]
    assert [(part.known, part.found["nodes_after"]) for part in row.parts] == [(False, 3), (True, 2)]
    (tmp_path / "out/p/report.json").unlink()
    assert in_parts(skip="eliminate_identity")[1] == ["p"]


def test_a_part_that_fails_leaves_the_others(in_parts, tmp_path: Path) -> None:
    shutil.copy(tmp_path / "small.onnx", tmp_path / "bad.onnx")
    (tmp_path / "bad.onnx").write_bytes((tmp_path / "bad.onnx").read_bytes()[:-9])
    row, ran = in_parts(second={"onnx": "bad.onnx"})
    assert ran == ["first", "second", "p"]
    assert (row.state, [part.state for part in row.parts]) == ("mistake", ["done", "mistake"])
    assert row.why.startswith("part second: ") and row.why.endswith("the other parts are in parts/first")
    assert "part second: " in json.loads((tmp_path / "out/p/report.json").read_text())["failure"]
    lines = [line.split() for line in (tmp_path / "out/batch.txt").read_text().splitlines()]
    assert [line[1:3] for line in lines if line[:1] == ["part"]] == [["first", "done"], ["second", "mistake"]]
    assert in_parts()[1] == ["second", "p"]


def test_one_process_does_a_run_in_parts_as_one_job(in_parts) -> None:
    row, ran = in_parts(whole=True)
    assert ran == ["p"]
    assert [(part.state, part.found["nodes_after"], part.attempts) for part in row.parts] == [("done", 2, 0)] * 2
    assert in_parts()[1] == []


def test_a_table_that_one_part_names_was_replaced(in_parts, tmp_path: Path) -> None:
    unsafe_table(tmp_path / "tables")
    in_parts(skip="unsafe:tables")
    unsafe_table(tmp_path / "tables", AuditFinding("eliminate_identity", "wrong", "models/mine"))
    row, ran = in_parts(skip="unsafe:tables")
    assert ran == ["first", "p"]
    assert [part.found["nodes_after"] for part in row.parts] == [3, 2]


# Which configurations a batch is made of.


def test_globs_are_expanded_and_each_file_is_taken_once(small_config, tmp_path: Path) -> None:
    for name in ("b", "a", "odd[1]"):
        small_config(f"{name}.yaml")
    planned = read_configs([str(tmp_path / "b.yaml"), str(tmp_path / "*.yaml"), str(tmp_path / "odd[1].yaml")])
    assert [config.path.name for config in planned] == ["b.yaml", "a.yaml", "odd[1].yaml"]


def test_overrides_hold_for_each(small_config, tmp_path: Path) -> None:
    small_config("a.yaml"), small_config("b.yaml")
    planned = read_configs([str(tmp_path / "*.yaml")], ["verify.draws=1"])
    assert [config.config.verify.draws for config in planned if config.config] == [1, 1]


def test_two_of_one_name_would_share_a_folder(small_config) -> None:
    first, second = small_config("a.yaml", name="same"), small_config("b.yaml", name="same")
    with pytest.raises(UsageError, match=r"a\.yaml and .*b\.yaml are both named 'same'"):
        read_configs([str(first), str(second)])


def test_a_pattern_that_names_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'.*nothing/\*\.yaml' names no file"):
        read_configs([str(tmp_path / "nothing/*.yaml")])


def test_one_that_cannot_be_read_is_kept_with_its_mistake(small_config) -> None:
    (planned,) = read_configs([str(small_config("a.yaml", passes={"recipes": []}))])
    assert planned.config is None
    assert "recipes" in str(planned.mistake)


def test_a_model_needs_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").touch(), (tmp_path / "b.py").touch()
    planned = read_configs([str(tmp_path / "*.onnx"), f"{tmp_path}/b.py:make", "package.module:make"])
    assert [one.name for one in planned] == ["a", "b-make", "package.module-make"]
    assert [one.config.model.onnx or one.config.model.factory for one in planned if one.config] == [
        f"{tmp_path}/a.onnx",
        f"{tmp_path}/b.py:make",
        "package.module:make",
    ]
