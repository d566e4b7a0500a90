"""Recipes: our steps and the user's. The default recipes are defined here, so that a configuration reads them without
loading onnx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

CLEANING: Final = (
    *("drop-softmax-guard", "fold-shape", "canonical-gelu", "canonical-norm", "canonical-rope"),
    *("merge-layout", "fold-scale"),
)
"""What `clean` stands for: steps of ours that only remove operators, after the libraries have done their work."""

DEFAULT_RECIPE: Final = ("default", "onnxsim", "clean")
"""For an ONNX file."""

FIRST_FOR_TORCH: Final = "onnxscript"
"""What torch has exported without optimizing has sequences, CastLike and calls that only onnxscript takes apart."""

TORCH_RECIPE: Final = (FIRST_FOR_TORCH, *DEFAULT_RECIPE)

EARLIER_RECIPES: Final[Mapping[str, tuple[str, ...]]] = {"default@0.1": ("default", "onnxsim")}
"""The default recipes of earlier releases for an ONNX file; for a model of torch's `FIRST_FOR_TORCH` comes first."""
