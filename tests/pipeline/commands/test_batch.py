"""The command: one broken configuration among good ones, and the same command again."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pipeline import Pipeline, RunConfig
from pipeline.cli import app
from pipeline.console import RunConsole
from pipeline.errors import UsageError
from pipeline.terminal.screen import Screen


def batch(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["batch", *map(str, arguments)], catch_exceptions=False)


def test_a_broken_one_does_not_hold_up_the_others(small_config, tmp_path: Path) -> None:
    small_config("a.yaml")
    small_config("b.yaml", passes={"recipe": ["eliminate_identity"], "keep": ["qkv"]})
    long = "c" * 70
    small_config(f"{long}.yaml", passes={"recipe": ["eliminate_identity"]}, runtimes={})
    small_config("d.yaml", passes={"recipe": ["eliminate_identity"], "keep": ["op:Tanh"]})
    out = tmp_path / "out"
    shown = batch(tmp_path / "*.yaml", "--out", out, "--jobs", 1)
    assert shown.exit_code == 2
    table = {line.split()[0]: line.split()[1:] for line in shown.stdout.splitlines() if line.strip()}
    assert table["a"][:4] == ["done", "3", "→", "2"]
    assert table["d"][:5] == ["done", "3", "→", "2", "1/1"]
    assert table["b"][0] == table[long][0] == "mistake"
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


# What the command line shows.


def test_schema_is_json_schema() -> None:
    shown = CliRunner().invoke(app, ["schema"], catch_exceptions=False)
    schema = json.loads(shown.stdout)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert "passes" in schema["properties"]


def screen_of(path: Path, out: Path, console: Screen) -> str:
    screen = RunConsole(console)
    with screen:
        result = Pipeline(RunConfig.from_yaml(path), out, screen.show).run()
    screen.conclude(result)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_a_log_has_one_line_a_stage_then_the_tables(config_file, tmp_path: Path) -> None:
    path = config_file(passes={"recipe": ["fuse_qkv", "onnxsim"], "skip": ["fuse_qkv"]})
    shown = screen_of(path, tmp_path / "out", Screen(file=StringIO(), width=80)).splitlines()
    stages = [line.split(":")[0] for line in shown[:8] if not line.startswith(("pass ", "note:"))]
    assert stages[:5] == ["source", "reference", "export", "passes", "runtime"]
    text = "\n".join(shown)
    for words in ("fuse_qkv was skipped", "onnxsim/fuse_attention", "reverted", "against torch", "files: "):
        assert words in text
    again = screen_of(path, tmp_path / "out", Screen(file=StringIO(), width=80))
    assert "export: unchanged, taken from the last run" in again
    assert "not done again, since nothing changed: export, passes, runtime" in again


def test_a_terminal_has_a_progress_bar(config_file, tmp_path: Path) -> None:
    console = Screen(file=StringIO(), force_terminal=True, width=120)
    shown = screen_of(config_file(passes={"recipe": ["nop"]}), tmp_path / "out", console)
    assert "━" in shown
    assert "passes" in shown


@pytest.mark.parametrize("command", ["run", "batch", "passes", "schema"])
def test_every_command_has_help(command: str) -> None:
    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
