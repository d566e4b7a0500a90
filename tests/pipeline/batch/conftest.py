from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import yaml

MODEL = """
<ir_version: 10, opset_import: ["": 20]>
small (float[2, 4] x) => (float[2, 4] y) {
    a = Relu (x)
    b = Identity (a)
    y = Tanh (b)
}
"""


@pytest.fixture
def small_config(tmp_path: Path):
    """Writes a configuration of a model of three nodes, with changes; returns its path."""
    onnx.save(onnx.parser.parse_model(MODEL), tmp_path / "small.onnx")

    def write(file: str, **sections: Any) -> Path:
        path = tmp_path / file
        data = {"model": {"onnx": "small.onnx"}, "passes": {"recipe": ["eliminate_identity"]}, **sections}
        path.write_text(yaml.safe_dump({**data, "runtime": {"backends": ["onnxruntime"]}}))
        return path

    return write
