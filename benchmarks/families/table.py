"""The table of families: the YAML files next to this one, with model classes small enough to export in seconds.

A row's `config` and `inputs` are written as in the section `model:` of a configuration. `without` says why no triple
is expected: what is there instead. `exports: false` is for a class that does not export; it is tried all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.config import ModelConfig

FOLDER = Path(__file__).parent

UNSEEN = FOLDER / "unseen"
"""Families that the steps were not written for."""


@dataclass(frozen=True, slots=True)
class Family:
    """One model class of `transformers`, with random weights."""

    name: str
    model: str
    """The class."""
    attention: str
    """Its kind, in words."""
    config: Mapping[str, Any] | str
    """Its keys, or a config.json next to the table."""
    inputs: Mapping[str, Any]
    without: str = ""
    no_softmax: Sequence[str] = ()
    """Classes of modules that have a Q, a K and a V, but do not take the softmax of Q·Kᵀ."""
    exports: bool = True
    fusions: str = "bert"
    """The `model_type` of onnxruntime's fusions."""

    def section(self) -> ModelConfig:
        """The section `model:` of a configuration."""
        config = str(FOLDER / self.config) if isinstance(self.config, str) else self.config
        source = {"class": self.model, "config": config}
        return ModelConfig.model_validate({"transformers": source, "inputs": self.inputs})


def families(folder: Path = FOLDER) -> dict[str, Family]:
    """All rows of the files in `folder` by name, in the order of the files and in them.

    Raises:
        ValueError: two rows have one name.
    """
    found: dict[str, Family] = {}
    for path in sorted(folder.glob("*.yaml")):
        written = yaml.safe_load(path.read_text(encoding="utf-8"))
        for name, row in written["families"].items():
            if name in found:
                raise ValueError(f"{path.name}: the family {name!r} is there already")
            row = {"fusions": written["fusions"], **row}
            found[name] = Family(name, row.pop("class"), **row)
    return found
