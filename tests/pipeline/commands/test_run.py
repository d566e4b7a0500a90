"""What the command line shows."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline import Pipeline, RunConfig
from pipeline.cli import app
from pipeline.console import RunConsole
from pipeline.terminal.screen import Screen


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
