"""Every command of a tutorial does what the page shows, one after the other, from the root of a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.docs.sessions import commands_of, missing_line

TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_every_command(page: Path, tmp_path: Path) -> None:
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    scripts = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{scripts}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    commands = commands_of(page)
    assert len(commands) > 3
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command.text], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        written = done.stdout + done.stderr
        assert done.returncode == command.code, f"{command.text}\n{written}"
        missing = missing_line(command.shown, written)
        assert missing is None, f"{command.text}\ndoes not write: {missing}\nbut\n{written}"
