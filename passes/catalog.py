"""Every pass that this installation can run: read from the installed libraries, never from memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from passes.base import Workbench
from passes.external import onnxoptimizer
from passes.external.onnx_shapes import InferShapes
from passes.external.onnxscript import OnnxScriptOptimizer
from passes.external.onnxsim import OnnxSim
from passes.rewrites.fold_constants import FoldConstants

__all__ = ["DESTROYS", "GROUPS", "OWN_STEPS", "Entry", "catalog"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One row: `name` as a recipe or a skip list writes it, and whether the library's default set runs it."""

    name: str
    source: str
    default: bool
    destroys: tuple[str, ...] = ()


def catalog(bench: Workbench, *, with_onnxsim: bool = True) -> tuple[Entry, ...]:
    """All passes: steps of a recipe first, then onnxsim's inner passes as `onnxsim/NAME`.

    `with_onnxsim=False` leaves onnxsim's inner passes out, whose listing starts a worker and takes seconds.
    """
    defaults = set(onnxoptimizer.default_set())
    rows = [
        Entry(name, "onnxoptimizer", name in defaults, DESTROYS.get(name, ())) for name in onnxoptimizer.available()
    ]
    rows += [Entry(name, step().source, False) for name, step in OWN_STEPS.items()]
    if with_onnxsim:
        rows += [Entry(f"onnxsim/{name}", "onnxsim", True, DESTROYS.get(name, ())) for name in OnnxSim().inner(bench)]
    return tuple(rows)


GROUPS: Final[Mapping[str, str]] = {"fusions": "fuse_*", "eliminations": "eliminate_*", "rewrites": "rewrite_*"}
"""Group → glob over pass names; the libraries name their passes by what they do."""

DESTROYS: Final[Mapping[str, tuple[str, ...]]] = {
    "fuse_qkv": ("qkv",),
    "fuse_attention": ("qkv",),
    "fuse_gqa": ("qkv",),
}
"""Passes that are known to destroy a structure. Skipping one of them watches the structure, whatever destroys it under
another name; and these are suspected first when a composite step has broken one."""

OWN_STEPS: Final = {
    "onnxsim": OnnxSim,
    "onnxscript": OnnxScriptOptimizer,
    "infer_shapes": InferShapes,
    "fold_constants": FoldConstants,
}
"""Recipe names of the steps that are not onnxoptimizer's."""
