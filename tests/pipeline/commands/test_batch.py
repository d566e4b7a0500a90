"""The command: one broken configuration among good ones, and the same command again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pipeline.cli import app
from pipeline.errors import UsageError


def batch(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["batch", *map(str, arguments)], catch_exceptions=False)


def test_a_broken_one_does_not_hold_up_the_others(small_config, tmp_path: Path) -> None:
    small_config("a.yaml")
    small_config("b.yaml", passes={"recipe": ["eliminate_identity"], "keep": ["qkv"]})
    small_config("c.yaml", passes={"recipe": ["eliminate_identity"]}, runtimes={})
    small_config("d.yaml", passes={"recipe": ["eliminate_identity"], "keep": ["op:Tanh"]})
    out = tmp_path / "out"
    shown = batch(tmp_path / "*.yaml", "--out", out, "--jobs", 1)
    assert shown.exit_code == 2
    table = {line.split()[0]: line.split()[1:] for line in shown.stdout.splitlines() if line.strip()}
    assert table["a"][:4] == ["done", "3", "→", "2"]
    assert table["d"][:5] == ["done", "3", "→", "2", "1/1"]
    assert table["b"][0] == table["c"][0] == "mistake"
    for words in ("keep", "unknown key 'runtimes'", "2 done, 2 mistake of 4"):
        assert words in shown.stdout
    shown_lines = {line.rstrip() for line in shown.stdout.splitlines()}
    assert set((out / "batch.txt").read_text().splitlines()) <= shown_lines
    assert {path.name for path in out.iterdir()} == {"a", "b", "d", "batch.txt", "batch.jsonl"}
    for name in "ad":
        assert {"model.onnx", "report.json", "log.txt"} <= {path.name for path in (out / name).iterdir()}


def test_json_and_the_same_command_again(small_config, tmp_path: Path) -> None:
    command = (small_config("a.yaml"), "--out", tmp_path / "out", "--json")
    first, again = (json.loads(batch(*command).stdout) for _ in range(2))
    assert (first["format_version"], first["exit_code"]) == (1, 0)
    (run,) = first["runs"]
    assert {"name": "a", "state": "done", "exit_code": 0, "known": False, "attempts": 1}.items() <= run.items()
    assert run["found"] == {
        "nodes_before": 3,
        "nodes_after": 2,
        "kept": 0,
        "structures": 0,
        "reverted": 0,
        "worst_error": 0.0,
        "unsupported": [],
    }
    assert again["runs"] == [{**run, "known": True}]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ray", "127.0.0.1:1"), "no Ray cluster answers"),
        (("--ray", "auto", "--jobs", "2"), "found --jobs with --ray"),
    ],
)
def test_a_cluster_that_cannot_be_used(arguments, words, small_config, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        batch(small_config("a.yaml"), "--out", tmp_path / "out", *arguments)
