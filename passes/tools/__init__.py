"""Everyday jobs on ONNX models: functions that run one step with its proof, split and merge models, and state facts.

doors.py    a function for each job, which runs the step of its name
parts.py    split a model into files, and merge two models
comparison.py  run two models, and compare outputs, layers and what both have
facts.py    what a model is: operators, parameters, MACs, memory, structures
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from passes.tools.comparison import ModelComparison, compare
    from passes.tools.doors import (
        change_batch,
        change_outputs,
        convert_opset,
        extract,
        fix_shapes,
        rename,
        to_bf16,
        to_fp16,
    )
    from passes.tools.facts import ModelFacts, inspect_model
    from passes.tools.parts import MergedModel, PartedModel, merge, split

__all__ = [
    "MergedModel",
    "ModelComparison",
    "ModelFacts",
    "PartedModel",
    "change_batch",
    "change_outputs",
    "compare",
    "convert_opset",
    "extract",
    "fix_shapes",
    "inspect_model",
    "merge",
    "rename",
    "split",
    "to_bf16",
    "to_fp16",
]

HOMES: Final = {
    "comparison": ("ModelComparison", "compare"),
    "doors": (
        *("change_batch", "change_outputs", "convert_opset", "extract"),
        *("fix_shapes", "rename", "to_bf16", "to_fp16"),
    ),
    "facts": ("ModelFacts", "inspect_model"),
    "parts": ("MergedModel", "PartedModel", "merge", "split"),
}
"""Module → its public names; it is loaded when one of them is first used, so that a fact costs no proof."""


def __getattr__(name: str) -> Any:
    home = next((module for module, names in HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
