"""Descriptions of the steps that a recipe names. Those of a library's passes are in its adapter (`Step.describes`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from passes.step import Description, structure, values

__all__ = ["STEPS", "UNDESCRIBED"]

UNDESCRIBED: Final = values("not described by this release of onnxline")
"""The description of a pass that the installed library has and our tables lack."""

STEPS: Final[Mapping[str, Description]] = {
    "clamp-mask": values("Raise the constants that mask attention to a finite bound, which quantization can represent"),
    "fold_constants": values("Compute what depends on constants alone, where that does not make the model larger"),
    "fold-batchnorm": values("Put BatchNormalization into the weight and bias of the product in front of it"),
    "infer_shapes": structure("Write the inferred type and shape of every value into the model"),
    "decompose-attention": structure("Take attention operators apart into MatMul, scale, mask, Softmax and MatMul"),
    "convert-opset": structure("Convert the model to another opset of ONNX, up or down"),
    "onnxruntime": values("Save what onnxruntime's own graph optimization makes of the model"),
    "onnxruntime_fusions": values("Run onnxruntime's fusions for transformers"),
    "onnxscript": values("Fold constants, inline functions and drop dead code by onnxscript's optimizer"),
    "onnxscript_rewrites": values("Run onnxscript's rewrite rules, or its fusions"),
    "onnxsim": values("Run onnxsim.simplify: its passes, constant folding and shape inference until nothing changes"),
    "onnxslim": values("Run onnxslim.slim: its fusion patterns and optimizations"),
    "rotate": values("Rotate the residual stream and the heads of a decoder by AIMET's SpinQuant"),
    "smooth-quant": values("Move outlier channels of activations into the weights behind them (SmoothQuant)"),
    "split-gate-up": values("Take merged projections of the gate and the value of a gated MLP apart"),
    "split-qkv": values("Take merged projections of Q, K and V apart"),
    "untie": structure("Give each module that reads a tied weight a copy of its own"),
}
