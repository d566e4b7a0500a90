from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

FACTORIES = Path(__file__).with_name("factories.py")


@pytest.fixture
def config_file(tmp_path: Path):
    """Writes a configuration of the small attention block, with changes; returns its path."""

    def write(name: str = "block", factory: str = "attention", **sections: Any) -> Path:
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
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        return path

    return write
