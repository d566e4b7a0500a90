"""`pipeline/compat` on PYTHONPATH makes us pytorch-ir; without it there is no `torch_ir`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes import run_forked

COMPAT = ROOT / "pipeline" / "compat"
PEER = os.environ.get("PYTORCH_IR_SOURCE")
"""Where the source package of pytorch-ir 0.2.3 is unpacked, on machines that have it."""


def python(*words: str, cwd: Path, paths: tuple[Path, ...] = (COMPAT, ROOT)) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=given, capture_output=True, text=True, timeout=300)


def test_code_in_the_style_of_pytorch_ir_runs(tmp_path: Path) -> None:
    script = Path(__file__).with_name("pytorch_ir_script.py")
    done = python("-W", "ignore", str(script), cwd=tmp_path)
    assert (done.stdout, done.returncode) == ("all of it\n", 0), done.stderr


def test_the_command_of_pytorch_ir_needs_no_path(tmp_path: Path) -> None:
    assert os.access(COMPAT / "pytorch-ir", os.X_OK)
    done = python(str(COMPAT / "pytorch-ir"), "info", "none.json", cwd=tmp_path, paths=())
    assert (done.returncode, done.stderr) == (1, "Error: file not found: none.json\n"), done.stderr
    code = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    said = run_forked("-c", code, COMPAT / "pytorch-ir", "--version", folder=tmp_path).stdout
    assert said == "pytorch-ir 0.2.3\n"


def test_it_is_not_there_by_accident(tmp_path: Path) -> None:
    code = "import importlib.util as u, pipeline; print(u.find_spec('torch_ir'))"
    done = python("-c", code, cwd=tmp_path, paths=(ROOT,))
    assert done.stdout == "None\n" or "site-packages" in done.stdout, done.stderr


def test_every_file_of_it_goes_into_the_wheel() -> None:
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    globs = settings["tool"]["setuptools"]["package-data"]["pipeline"]
    packed = {file for glob in globs for file in (ROOT / "pipeline").glob(glob)}
    assert {file for file in COMPAT.rglob("*") if file.suffix in (".py", ".typed")} <= packed


@pytest.mark.skipif(PEER is None, reason="PYTORCH_IR_SOURCE does not say where pytorch-ir's source package is unpacked")
def test_the_tests_of_pytorch_ir_pass(tmp_path: Path) -> None:
    shutil.copytree(Path(PEER or "") / "tests", tmp_path / "tests")
    done = python("-m", "pytest", "tests", "-q", "-rs", "-p", "no:cacheprovider", "-n", "0", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("mmdc" in line for line in skipped), skipped
