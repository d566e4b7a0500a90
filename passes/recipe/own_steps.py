"""The steps that a recipe can name, one row each. The module of a step is imported when its class is first asked for:
to make all classes takes a tenth of a second, and a run needs a few."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from passes.step import Step


class StepTypes(Mapping[str, "type[Step]"]):
    """Name of a step → its class.

    Args:
        homes: name of a step → `room.module.Class` in this package.
    """

    def __init__(self, homes: Mapping[str, str]) -> None:
        self._homes = dict(homes)

    def __getitem__(self, name: str) -> type[Step]:
        module, _, class_name = self._homes[name].rpartition(".")
        return getattr(importlib.import_module(f"{PACKAGE}.{module}"), class_name)

    def __contains__(self, name: object) -> bool:
        return name in self._homes

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


PACKAGE: Final = __name__.rpartition(".recipe.")[0]

OWN_STEPS: Final = StepTypes(
    {
        "onnxsim": "external.onnxsim.OnnxSim",
        "onnxslim": "external.onnxslim.OnnxSlim",
        "onnxruntime": "external.onnxruntime_graph.OnnxRuntimeGraph",
        "onnxruntime_fusions": "external.onnxruntime_graph.OnnxRuntimeFusions",
        "onnxscript": "external.onnxscript.OnnxScriptOptimizer",
        "onnxscript_rewrites": "external.onnxscript.OnnxScriptRewrites",
        "infer_shapes": "rewrites.convert_opset.InferShapes",
        "fold_constants": "rewrites.fold_constants.FoldConstants",
        "split-qkv": "rewrites.split_merged.SplitQkv",
        "split-gate-up": "rewrites.split_merged.SplitGateUp",
        "clamp-mask": "rewrites.clamp_mask.ClampMask",
        "untie": "rewrites.untie.Untie",
        "tie": "rewrites.untie.Tie",
        "decompose-attention": "rewrites.attention_operators.DecomposeAttention",
        "convert-opset": "rewrites.convert_opset.ConvertOpset",
        "fix-defaults": "rewrites.fold_constants.FixDefaults",
        "fold-batchnorm": "rewrites.fold_batchnorm.FoldBatchnorm",
        "smooth-quant": "rewrites.smooth_quant.SmoothQuant",
        "awq": "rewrites.smooth_quant.Awq",
        "cross-layer-equalization": "external.onnxsim_equalize.CrossLayerEqualization",
        "rotate": "external.aimet_rotations.Rotate",
        "drop-softmax-guard": "rewrites.softmax_guard.DropSoftmaxGuard",
        "fold-shape": "rewrites.fold_shape.FoldShape",
        "merge-layout": "rewrites.merge_layout.MergeLayout",
        "fold-scale": "rewrites.fold_scale.FoldScale",
        "canonical-attention": "rewrites.canonical_attention.CanonicalAttention",
        "canonical-norm": "rewrites.canonical_parts.CanonicalNorm",
        "canonical-gelu": "rewrites.canonical_parts.CanonicalGelu",
        "canonical-rope": "rewrites.canonical_rope.CanonicalRope",
        "linear-to-conv": "rewrites.npu_forms.LinearToConv",
        "mha-to-sha": "rewrites.npu_forms.MhaToSha",
        "no-int64": "rewrites.npu_forms.NoInt64",
        "to-4d": "rewrites.four_axes.To4d",
        "to-nhwc": "rewrites.channels_last.ToNhwc",
        "extract": "rewrites.interface.Extract",
        "outputs": "rewrites.interface.ChangeOutputs",
        "rename": "rewrites.interface.Rename",
        "fix-shapes": "rewrites.interface.FixShapes",
        "change-batch": "rewrites.interface.ChangeBatch",
        "to-fp16": "rewrites.half_precision.ToFp16",
        "to-bf16": "rewrites.half_precision.ToBf16",
        "to-matmul-nbits": "rewrites.matmul_nbits.ToMatMulNBits",
        "from-matmul-nbits": "rewrites.matmul_nbits.FromMatMulNBits",
        "take-weights": "rewrites.take_weights.TakeWeights",
        "merge": "rewrites.merge.Merge",
        "lora-inputs": "rewrites.interface.LoraInputs",
    }
)
"""Name in a recipe → the class of the step, in the order of the catalogue."""
