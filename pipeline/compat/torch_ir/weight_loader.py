"""Load weights from files."""

from __future__ import annotations

from pathlib import Path

import torch

from pipeline.torch_ir import (
    IR,
    WeightLoadError,
    load_weights,
    load_weights_pt,
    load_weights_safetensors,
    validate_weights_against_ir,
)

__all__ = [
    "IR",
    "WeightLoadError",
    "WeightLoader",
    "load_weights",
    "load_weights_pt",
    "load_weights_safetensors",
    "validate_weights_against_ir",
]


class WeightLoader:
    """`load_weights`, as a method."""

    def load(self, path: str | Path) -> dict[str, torch.Tensor]:
        return load_weights(path)
