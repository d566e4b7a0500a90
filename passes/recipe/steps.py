"""The steps that a recipe can name, one row each, and queries over all steps: passes and versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Final

from passes.external import onnxoptimizer
from passes.external.aimet_rotations import Rotate
from passes.external.onnxruntime_graph import OnnxRuntimeFusions, OnnxRuntimeGraph
from passes.external.onnxscript import OnnxScriptOptimizer, OnnxScriptRewrites
from passes.external.onnxsim import OnnxSim
from passes.external.onnxslim import OnnxSlim
from passes.rewrites.clamp_mask import ClampMask
from passes.rewrites.convert_opset import ConvertOpset, InferShapes
from passes.rewrites.decompose_attention import DecomposeAttention
from passes.rewrites.fold_batchnorm import FoldBatchnorm
from passes.rewrites.fold_constants import FixDefaults, FoldConstants
from passes.rewrites.smooth_quant import SmoothQuant
from passes.rewrites.split_merged import SplitGateUp, SplitQkv
from passes.rewrites.untie import Tie, Untie
from passes.step import Step

OWN_STEPS: Final[Mapping[str, type[Step]]] = {
    "onnxsim": OnnxSim,
    "onnxslim": OnnxSlim,
    "onnxruntime": OnnxRuntimeGraph,
    "onnxruntime_fusions": OnnxRuntimeFusions,
    "onnxscript": OnnxScriptOptimizer,
    "onnxscript_rewrites": OnnxScriptRewrites,
    "infer_shapes": InferShapes,
    "fold_constants": FoldConstants,
    "split-qkv": SplitQkv,
    "split-gate-up": SplitGateUp,
    "clamp-mask": ClampMask,
    "untie": Untie,
    "tie": Tie,
    "decompose-attention": DecomposeAttention,
    "convert-opset": ConvertOpset,
    "fix-defaults": FixDefaults,
    "fold-batchnorm": FoldBatchnorm,
    "smooth-quant": SmoothQuant,
    "rotate": Rotate,
}

STEP_TYPES: Final[Sequence[type[Step]]] = (*OWN_STEPS.values(), onnxoptimizer.OnnxOptimizerPass)
"""The class of each step; the last class stands for the passes that a recipe names one by one."""

SINGLE_PASS_LIBRARY: Final = onnxoptimizer.NAME
"""The library whose passes a recipe names one by one."""

LIBRARIES: Final = tuple(dict.fromkeys((SINGLE_PASS_LIBRARY, *(make().source for make in OWN_STEPS.values()))))
"""The distributions that the steps come from, onnxline itself among them."""


def single_passes() -> tuple[Step, ...]:
    """The passes of the installed release that a recipe names one by one."""
    return onnxoptimizer.passes_of(onnxoptimizer.available())


def default_passes() -> tuple[Step, ...]:
    """The passes that `default` stands for, in the order of their library."""
    return onnxoptimizer.passes_of(onnxoptimizer.default_set())


def known_names() -> tuple[str, ...]:
    """Every name of a step that needs no package of the user's own."""
    return (*onnxoptimizer.available(), *OWN_STEPS)


def library_versions(more: Sequence[str] = ()) -> dict[str, str]:
    """Name → version of the libraries whose release can change a result, and of `more`, where they are installed."""
    libraries = (name for name in LIBRARIES if name != "onnxline")
    names = dict.fromkeys(("onnx", "onnx_ir", *libraries, "numpy", "protobuf", *more))
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
