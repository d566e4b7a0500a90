"""Steps of a recipe that are not passes of onnxoptimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from passes.catalog.about import About, structure, values

__all__ = ["STEPS"]

STEPS: Final[Mapping[str, About]] = {
    "fold_constants": values("Compute what depends on constants alone, where that does not make the model larger"),
    "infer_shapes": structure("Write the inferred type and shape of every value into the model"),
    "onnxruntime": values("Save what onnxruntime's own graph optimization makes of the model"),
    "onnxruntime_fusions": values("Run onnxruntime's fusions for transformers"),
    "onnxscript": values("Fold constants, inline functions and drop dead code by onnxscript's optimizer"),
    "onnxscript_rewrites": values("Run onnxscript's rewrite rules, or its fusions"),
    "onnxsim": values("Run onnxsim.simplify: its passes, constant folding and shape inference until nothing changes"),
    "onnxslim": values("Run onnxslim.slim: its fusion patterns and optimizations"),
}
