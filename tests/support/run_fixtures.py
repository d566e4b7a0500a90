"""Fixtures of the tests that run configurations and commands: a conftest.py takes what its folder needs."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import pytest
import yaml

from pipeline.cli import main
from tests.support.paths import TESTS

FACTORIES = TESTS / "support" / "torch_models" / "factories.py"
"""Not beside this file: what is loaded from beside a factory counts as a part of it."""

SMALL_MODEL = """
<ir_version: 10, opset_import: ["": 20]>
small (float[2, 4] x) => (float[2, 4] y) {
    a = Relu (x)
    b = Identity (a)
    y = Tanh (b)
}
"""


@pytest.fixture(scope="session")
def config_in():
    """Writes a configuration of the small attention block into a folder, with changes; returns its path."""

    def write(folder: Path, name: str = "block", factory: str = "attention", **sections: Any) -> Path:
        data: dict[str, Any] = {
            "name": name,
            "model": {
                "factory": f"{FACTORIES}:{factory}",
                "inputs": {"x": {"shape": [2, 8, 32], "dtype": "float32"}},
            },
            "verify": {"draws": 1},
        }
        for section, values in sections.items():
            data[section] = {**data.get(section, {}), **values}
        # A test that names only the dtype of an input, say, keeps the shape.
        inputs = data["model"]["inputs"]
        if "shape" not in inputs.get("x", {"shape": ()}):
            inputs["x"] = {"shape": [2, 8, 32], **inputs["x"]}
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        return path

    return write


@pytest.fixture
def config_file(config_in, tmp_path: Path):
    """The same, into `tmp_path`."""
    return partial(config_in, tmp_path)


@pytest.fixture
def command_line(capsys, monkeypatch):
    """The command line in this process: exit code, and what it says on standard output and on standard error."""

    def ask(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["onnxline", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return ask


@pytest.fixture
def small_config(tmp_path: Path):
    """Writes a configuration of a model of three nodes, with changes; returns its path."""
    onnx.save(onnx.parser.parse_model(SMALL_MODEL), tmp_path / "small.onnx")

    def write(file: str, **sections: Any) -> Path:
        path = tmp_path / file
        data = {"model": {"onnx": "small.onnx"}, "passes": {"recipe": ["eliminate_identity"]}, **sections}
        path.write_text(yaml.safe_dump({**data, "runtime": {"backends": ["onnxruntime"]}}))
        return path

    return write
