"""Recipes: the steps that there are, and those of the user. The recipes that run where none is named stand here, where
a configuration finds them without loading onnx."""

from __future__ import annotations

from typing import Final

__all__ = ["DEFAULT_RECIPE", "TORCH_RECIPE"]

DEFAULT_RECIPE: Final = ("default", "onnxsim")
"""For an ONNX file."""

TORCH_RECIPE: Final = ("onnxscript", *DEFAULT_RECIPE)
"""For what torch has exported without optimizing: sequences, CastLike and calls that only onnxscript takes apart."""
