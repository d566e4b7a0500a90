"""What `onnxline quantsim` prints of a simulation."""

from __future__ import annotations

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
