"""The steps of a recipe that are not onnxoptimizer's, by the name that a recipe gives them."""

from __future__ import annotations

from typing import Final

from passes.external.onnx_shapes import InferShapes
from passes.external.onnxruntime_fusions import OnnxRuntimeFusions
from passes.external.onnxruntime_graph import OnnxRuntimeGraph
from passes.external.onnxscript import OnnxScriptOptimizer
from passes.external.onnxscript_rewrites import OnnxScriptRewrites
from passes.external.onnxsim import OnnxSim
from passes.external.onnxslim import OnnxSlim
from passes.rewrites.fold_constants import FoldConstants

__all__ = ["OWN_STEPS"]

OWN_STEPS: Final = {
    "onnxsim": OnnxSim,
    "onnxslim": OnnxSlim,
    "onnxruntime": OnnxRuntimeGraph,
    "onnxruntime_fusions": OnnxRuntimeFusions,
    "onnxscript": OnnxScriptOptimizer,
    "onnxscript_rewrites": OnnxScriptRewrites,
    "infer_shapes": InferShapes,
    "fold_constants": FoldConstants,
}
