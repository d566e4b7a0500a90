"""Verify an IR against its model, with the executor of this package, which does not check input sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline.torch_ir import IR, IRVerifier, VerificationReport, load_weights
from pipeline.torch_ir.comparison import compare
from torch_ir.executor import IRExecutor, execute_ir

__all__ = [
    "IRVerifier",
    "VerificationReport",
    "_compare_tensors",
    "execute_ir",
    "verify_ir",
    "verify_ir_with_state_dict",
]

Tensors = Mapping[str, torch.Tensor]


def _compare_tensors(
    original: torch.Tensor, ir_output: torch.Tensor, rtol: float | None = None, atol: float | None = None
) -> tuple[bool, float, float]:
    """(is_close, max_diff, mean_diff): `compare` under pytorch-ir's name."""
    found = compare(original, ir_output, rtol, atol)
    return found.is_close, found.max_diff, found.mean_diff


def verify_ir(
    ir: IR,
    weights_path: str | Path,
    original_model: nn.Module,
    test_inputs: Sequence[Any],
    rtol: float = 1e-5,
    atol: float = 1e-5,
    constants: Tensors | None = None,
) -> tuple[bool, VerificationReport]:
    """`verify_ir_with_state_dict`, with weights from a file."""
    return verify_ir_with_state_dict(ir, load_weights(weights_path), original_model, test_inputs, rtol, atol, constants)


def verify_ir_with_state_dict(
    ir: IR,
    state_dict: Tensors,
    original_model: nn.Module,
    test_inputs: Sequence[Any],
    rtol: float = 1e-5,
    atol: float = 1e-5,
    constants: Tensors | None = None,
) -> tuple[bool, VerificationReport]:
    """See `pipeline.torch_ir.verify_ir_with_state_dict`."""
    verifier = IRVerifier(rtol, atol, executor=IRExecutor)
    return verifier.verify(ir, state_dict, original_model, test_inputs, constants)
