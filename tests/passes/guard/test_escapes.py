"""A command in which a Python runs without the guard is known by its words, or by the shell script that it runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from passes.guard.startup.escapes import describe_escape, is_python
from passes.guard.startup.hooks import FOLDER, VARIABLE

GONE = f"{VARIABLE} is not in its environment"
REPLACED = "its PYTHONPATH was replaced"
SCRIPTS = {
    "env -i python tool.py": GONE,
    f"unset {VARIABLE}\npython3.12 tool.py": GONE,
    "PYTHONPATH=src python -m tool": REPLACED,
    "export PYTHONPATH=src:$PYTHONPATH\npython tool.py": "another folder comes first on its PYTHONPATH",
    "python -sI tool.py": "python -I ignores the guard",
    "PYTHONPATH=$PYTHONPATH:src python tool.py": "",
    "python tool.py -I -E": "",
    "env -i make": "",
    "unset LANG; python tool.py": "",
}
"""Text of a shell → the reason."""


def escape(*words: str) -> str:
    return describe_escape(words[0], words, VARIABLE, FOLDER)


@pytest.mark.parametrize("text", SCRIPTS, ids=range(len(SCRIPTS)))
def test_a_shell_by_its_text_and_by_its_script(text: str, tmp_path: Path) -> None:
    script = tmp_path / "build.sh"
    script.write_text(text)
    for words in (("sh", "-c", text), ("/bin/bash", str(script))):
        reason = SCRIPTS[text]
        assert reason in escape(*words)
        assert bool(escape(*words)) == bool(reason)
    script.write_text(f"#!/bin/sh\n{text}")
    assert bool(escape(str(script))) == bool(SCRIPTS[text])


def test_a_python_by_its_options() -> None:
    assert escape(sys.executable, "-I", "tool.py").endswith("(python -I reads no PYTHONPATH)")
    assert escape(sys.executable, "-uS", "tool.py").endswith("(python -S loads no site)")
    assert escape(sys.executable, "tool.py", "-I") == escape(sys.executable, "-c", "-I") == ""
    assert escape("grep", "-I", "python", "tool.py") == ""


def test_a_python_by_another_name(tmp_path: Path) -> None:
    other = tmp_path / "snake"
    other.write_bytes(Path(sys.executable).resolve().read_bytes())
    assert is_python(str(other)) and is_python("python3")
    assert not is_python("/bin/sh") and not is_python(str(tmp_path)) and not is_python("no such program")
    assert GONE in escape("env", "-i", str(other), "tool.py")
