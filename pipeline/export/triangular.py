"""Systems with a triangular matrix: their form in ONNX, and models that would unroll them row by row in a trace.

The inverse of a triangular matrix is put together from blocks on the diagonal that double in size: the inverse of
`[[A, 0], [B, C]]` is `[[A⁻¹, 0], [-C⁻¹ B A⁻¹, C⁻¹]]`. So 64 rows need 6 rounds of two products, and round as forward
substitution does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch

import numpy as np
from onnxscript import ir
from onnxscript.onnx_opset import opset18
from torch import nn

op: Final[Any] = opset18
"""Typed as Any: its annotations are for eager evaluation, and here it adds nodes to torch's graph."""


def translate_solve_triangular(
    self: Any, right: Any, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    """`aten.linalg_solve_triangular`: X of `self @ X = right`, or of `X @ self = right` where not `left`.

    Raises:
        NotImplementedError: the rows of the matrix are an open dim.
    """
    count = self.shape[-1]
    if not isinstance(count, int):
        raise NotImplementedError("a triangular system has a form in ONNX where the rows of its matrix are a number")
    zero = op.Constant(value=ir.tensor(0.0, self.dtype))
    matrix, diagonal = self, None
    if not unitriangular:  # self is a diagonal matrix times one with ones on its diagonal
        only = op.Where(_constant(np.eye(count, dtype=bool)), self, zero)
        rows, columns = (op.ReduceSum(only, op.Constant(value_ints=[axis]), keepdims=1) for axis in (-1, -2))
        matrix, diagonal = op.Div(self, rows), rows if left else columns
    inverse = op.CastLike(_constant(np.eye(count, dtype=np.float32)), self)
    places, size = np.arange(count), 1
    while size < count or size == 1:
        blocks, halves = places // (2 * size), places // size
        first, second = (halves[:, None], halves) if not upper else (halves, halves[:, None])
        chosen = (blocks[:, None] == blocks) & (first > second)
        corner = op.Where(_constant(chosen), matrix, zero)
        step = corner if size == 1 else op.MatMul(op.MatMul(inverse, corner), inverse)
        inverse, size = op.Sub(inverse, step), 2 * size
    if left:
        return op.MatMul(inverse, right if diagonal is None else op.Div(right, diagonal))
    result = op.MatMul(right, inverse)
    return result if diagonal is None else op.Div(result, diagonal)


def _constant(array: np.ndarray) -> Any:
    return op.Constant(value=ir.tensor(array))


@contextmanager
def keep_triangular_systems(module: nn.Module) -> Iterator[None]:
    """Let the delta rule of transformers call `torch.linalg.solve_triangular` in a trace too.

    For exporters without that operator it writes each of 64 rows of a chunk in place, which takes torch 20 s of
    processor time for each layer to trace.
    """
    with ExitStack() as stack:
        for name in sorted({type(part).__module__ for part in module.modules()}):
            file = sys.modules.get(name)
            if hasattr(file, DELTA_RULE) and hasattr(file, ASKS):
                stack.enter_context(patch.object(file, ASKS, lambda: False))
        yield


DELTA_RULE: Final = "torch_chunk_gated_delta_rule"

ASKS: Final = "is_torchdynamo_exporting"
"""The function of transformers by which the delta rule chooses; these files ask it for nothing else."""
