"""Weights of an IR: load.py reads the files of a checkpoint, binding.py tells which tensor is which weight."""

from pipeline.torch_ir.weights.load import (
    load_weights,
    load_weights_pt,
    load_weights_safetensors,
    validate_weights_against_ir,
)

__all__ = ["load_weights", "load_weights_pt", "load_weights_safetensors", "validate_weights_against_ir"]
