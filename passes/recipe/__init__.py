"""Recipes: our steps and the user's. The default recipes are defined here, so that a configuration reads them without
loading onnx."""

from __future__ import annotations

from typing import Final

__all__ = ["DEFAULT_RECIPE", "TORCH_RECIPE"]

DEFAULT_RECIPE: Final = ("default", "onnxsim")
"""For an ONNX file."""

TORCH_RECIPE: Final = ("onnxscript", *DEFAULT_RECIPE)
"""For what torch has exported without optimizing: sequences, CastLike and calls that only onnxscript takes apart."""
