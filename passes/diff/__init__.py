"""How two models differ: by structure, whatever their nodes are called, and by numbers.

types.py            what differs, as data
model_matching.py   which nodes and values are the same
compare.py          all of it together, node by node
initializers.py     the stored tensors; model_level.py, the model itself
numbers.py          how far outputs, values between, and values where a layer ends are apart
formats.py          in words, and for JSON
"""

from __future__ import annotations

from passes.diff.compare import compare_matched, compare_models
from passes.diff.formats import (
    diff_as_data,
    diff_text,
    layers_as_data,
    layers_text,
    numbers_as_data,
    numbers_text,
    summary,
)
from passes.diff.model_matching import ModelMatching, match_models
from passes.diff.numbers import DrawnInputs, LayerErrors, Numbers, compare_layers, compare_numbers, draw_inputs
from passes.diff.types import Diff

__all__ = [
    "Diff",
    "DrawnInputs",
    "LayerErrors",
    "ModelMatching",
    "Numbers",
    "compare_layers",
    "compare_matched",
    "compare_models",
    "compare_numbers",
    "diff_as_data",
    "diff_text",
    "draw_inputs",
    "layers_as_data",
    "layers_text",
    "match_models",
    "numbers_as_data",
    "numbers_text",
    "summary",
]
