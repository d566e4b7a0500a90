"""Which words belong to which pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from passes.catalog.about import About, values
from passes.catalog.about_onnxoptimizer import ONNXOPTIMIZER
from passes.catalog.about_onnxruntime import ONNXRUNTIME, ONNXRUNTIME_FUSIONS
from passes.catalog.about_onnxscript import ONNXSCRIPT, ONNXSCRIPT_REWRITES
from passes.catalog.about_onnxsim import ONNXSIM
from passes.catalog.about_onnxsim_extra import ONNXSIM_EXTRA
from passes.catalog.about_onnxslim import ONNXSLIM
from passes.catalog.about_steps import STEPS
from passes.catalog.entry import UNDESCRIBED

__all__ = ["DESCRIBED", "about"]


def about(name: str) -> About:
    """The words for a pass by its full name; a pass without any counts as one that reads values."""
    step, _, bare = name.rpartition("/")
    return DESCRIBED.get(step, {}).get(bare, values(UNDESCRIBED))


DESCRIBED: Final[Mapping[str, Mapping[str, About]]] = {
    "": {**ONNXOPTIMIZER, **STEPS},
    # onnxsim carries onnxoptimizer inside.
    "onnxsim": {**ONNXOPTIMIZER, **ONNXSIM_EXTRA, **ONNXSIM},
    "onnxslim": ONNXSLIM,
    "onnxruntime": ONNXRUNTIME,
    "onnxruntime_fusions": ONNXRUNTIME_FUSIONS,
    "onnxscript": ONNXSCRIPT,
    "onnxscript_rewrites": ONNXSCRIPT_REWRITES,
}
"""Step → bare name → words; the step is empty for what a recipe names by itself."""
