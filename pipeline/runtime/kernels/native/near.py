"""Products of matrices that are small enough for a near cache, with a bias, ReLU, or the gradient of one."""

from __future__ import annotations

import math

import torch

from pipeline.ops import Kind
from pipeline.runtime.kernels.base import Attrs, Ins, Launch, Outs, planned_threads
from pipeline.runtime.kernels.native.kernel_library import NativeKernel, NativeLibrary, are_floats

LARGEST = 2**19
"""Numbers in a second operand. Where one has more (2 MB), panels are as fast."""


def launch_near(
    library: NativeLibrary,
    x: torch.Tensor,
    matrix: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    relu: bool = False,
    gate: torch.Tensor | None = None,
) -> Launch | None:
    """The product of two matrices plus a bias; then ReLU, or 0 where `gate`, the result of a ReLU, is 0."""
    added = [tensor for tensor in (bias, gate) if tensor is not None]
    if planned_threads() > 1 or not are_floats(x, matrix, out, *added) or matrix.numel() > LARGEST:
        return None
    if x.dim() != 2 or matrix.dim() != 2 or 1 not in matrix.stride():
        return None
    if not all(tensor.is_contiguous() for tensor in (out, *added)):
        return None
    if (bias is not None and bias.shape != matrix.shape[1:]) or (gate is not None and gate.shape != out.shape):
        return None
    columns = matrix.shape[1]
    if x.shape[1] != len(matrix) or out.shape != (len(x), columns):
        return None
    step, column = (columns, 1) if matrix.is_contiguous() else matrix.stride()
    settings = (len(x), columns, len(matrix), *x.stride(), step, column, int(bias is not None), int(gate is not None))
    floor = 0.0 if relu else -math.inf
    return library.launch("multiply_near_matrices", [out], [x, matrix, *added], (*settings, floor))


def relu_product(library: NativeLibrary, ins: Ins, outs: Outs, attrs: Attrs) -> Launch | None:
    (x, matrix, *more), gated = ins, bool(attrs["gate"])
    bias, gate = more[0] if attrs["bias"] else None, more[-1] if gated else None
    return launch_near(library, x, matrix, outs[0], bias=bias, relu=not gated, gate=gate)


KERNELS: dict[Kind, NativeKernel] = {Kind.ReluProduct: relu_product}
