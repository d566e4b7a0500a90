"""Weights of an IR.

load.py   from the files of a checkpoint                stored.py   which tensor is which weight
arrays.py   named tensors in a file
"""

from pipeline.torch_ir.weights.load import (
    load_weights,
    load_weights_pt,
    load_weights_safetensors,
    validate_weights_against_ir,
)

__all__ = ["load_weights", "load_weights_pt", "load_weights_safetensors", "validate_weights_against_ir"]
