"""What `onnxline quantsim` prints of a simulation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from passes.provenance.annotations import ModulePath, write_module_path
from passes.weights.detached import read_model
from passes.weights.files import save
from pipeline.cli import app
from pipeline.quantsim.report import LAYER_TITLES
from tests.pipeline.commands.quantized_files import mlp_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The two products, of which the second was made in a module."""
    model = read_model(mlp_file(tmp_path))
    write_module_path(model.proto.graph.node[3], ModulePath(("", "net.head"), (), ()), "torch")
    save(model, tmp_path / "in_modules.onnx")
    return tmp_path / "in_modules.onnx"


def test_layers_are_printed_with_module_and_share(file: Path) -> None:
    options = ["--set", "passes.recipe=[]", "--out", str(file.parent / "out")]
    shown = CliRunner().invoke(app, ["quantsim", str(file), *options]).stdout.splitlines()
    [start] = [number for number, line in enumerate(shown) if tuple(line.split()) == LAYER_TITLES]
    rows = {line.split()[0]: line.split() for line in shown[start + 1 : start + 3]}
    assert rows.keys() == {"h", "y"}
    assert rows["y"][1:3] == ["MatMul", "net.head"]
    assert sum(float(row[-1].rstrip("%")) for row in rows.values()) == pytest.approx(100, abs=0.2)


BEGUN = """
import os, sys
from pathlib import Path
from pipeline.cli import main
sys.argv = ["onnxline", "quantsim", "--help"]
try:
    main()
except SystemExit:
    pass
import pipeline.quantsim.run
threads = len(list(Path("/proc/self/task").iterdir()))
rooms = ("planning", "importers", "lowering", "ir", "ops", "runtime")
loaded = [name for name in rooms if f"pipeline.{name}" in sys.modules]
print("begun", threads, "OPENBLAS_NUM_THREADS" in os.environ, loaded)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted by Linux's /proc")
def test_the_command_has_one_thread_and_no_planner() -> None:
    """Workers are forks then, with what the command has imported; jobs that it starts have threads of their own."""
    environment = {name: text for name, text in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    environment.pop("OMP_NUM_THREADS", None)
    words = [sys.executable, "-c", BEGUN]
    ended = subprocess.run(words, capture_output=True, text=True, check=True, env=environment, timeout=120)
    assert ended.stdout.splitlines()[-1] == "begun 1 False []"
