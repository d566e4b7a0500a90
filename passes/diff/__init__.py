"""How two models differ: by structure, whatever their nodes are called, and by numbers.

found.py          what differs, as data
matched.py        which nodes and values are the same
compare.py        all of it together: attributes.py and inputs.py of a node, initializers.py, renamed.py,
                  header.py and whole.py of the model
numbers.py        how far outputs, and values between, are apart
layers.py         how far values are apart where a layer ends
text.py           in words             data.py     for JSON
"""

from __future__ import annotations

from passes.diff.compare import compare_matched, compare_models
from passes.diff.data import diff_as_data, layers_as_data, numbers_as_data
from passes.diff.found import Diff
from passes.diff.layers import LayerErrors, compare_layers
from passes.diff.matched import Matched, match_models
from passes.diff.numbers import DrawnInputs, Numbers, compare_numbers, draw_inputs
from passes.diff.text import diff_text, layers_text, numbers_text, summary

__all__ = [
    "Diff",
    "DrawnInputs",
    "LayerErrors",
    "Matched",
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
