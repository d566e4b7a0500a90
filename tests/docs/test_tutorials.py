"""Every command of a tutorial, and of the quick start, does what the page shows, from the root of a checkout."""

from __future__ import annotations

import os
import runpy
import shlex
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from pipeline.cli import main
from tests.docs.sessions import Command, commands_of, missing_line
from tests.support.paths import ROOT

TUTORIALS = [ROOT / "docs/start/quick-start.md", *sorted((ROOT / "docs/tutorials").glob("*.md"))]


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_every_command(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("COLUMNS", "120")
    commands = commands_of(page)
    assert len(commands) > 1
    for command in commands:
        code = here(command, monkeypatch) if runs_here(command) else in_a_shell(command)
        written = "".join(capfd.readouterr())
        assert code == command.code, f"{command.text}\n{written}"
        missing = missing_line(command.shown, written)
        assert missing is None, f"{command.text}\ndoes not write: {missing}\nbut\n{written}"


def runs_here(command: Command) -> bool:
    """Whether it may run in this process, where torch is loaded but once: a command of ours, or a script that calls us.
    A guard is for the processes that it starts: there the shell has to find the installed command."""
    if command.text.startswith("python ") and len(command.text.split()) == 2:
        return "onnxline" in Path(command.text.split()[1]).read_text(encoding="utf-8")
    return command.text.startswith("onnxline ") and not command.text.startswith("onnxline guard ")


def here(command: Command, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of `onnxline …` or `python …`."""
    program, *words = shlex.split(command.text)
    monkeypatch.setattr(sys, "argv", words if program == "python" else [program, *words])
    try:
        main() if program == "onnxline" else runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def in_a_shell(command: Command) -> int:
    return subprocess.run(["bash", "-c", command.text], timeout=300).returncode
