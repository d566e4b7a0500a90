"""Compare two models: by structure, whatever the names of their nodes, and by the values that they compute.

types.py            the differences, as data
model_matching.py   matches nodes, values, inputs and outputs
compare.py          compares node by node, and the models as a whole: read this first
initializers.py     compares stored tensors
quantizations.py    tells which tensors the second model quantizes, and which two quantized models quantize otherwise
numbers.py          measures the errors of outputs, inner values, and values at which a layer ends
formats.py          the differences as text, and for JSON
"""

from passes.diff.compare import compare_matched, compare_models
from passes.diff.formats import (
    diff_as_data,
    diff_text,
    layers_as_data,
    layers_text,
    numbers_as_data,
    numbers_text,
    summarize,
)
from passes.diff.layers import LayerErrors, compare_layers
from passes.diff.model_matching import ModelMatching, match_models
from passes.diff.numbers import DrawnInputs, Numbers, compare_numbers, draw_inputs
from passes.diff.types import Diff
