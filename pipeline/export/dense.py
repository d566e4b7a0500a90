"""Tensors are dense, in examples and in an IR; other ways to hold numbers are refused, with what to do about it."""

from __future__ import annotations

import torch

__all__ = ["not_dense"]


def not_dense(tensor: torch.Tensor) -> str:
    """Such as `a sparse tensor (torch.sparse_csr), expected a dense one: call .to_dense()`; empty for a dense tensor.

    Has to be asked before the shape: a nested tensor has none.
    """
    if tensor.is_nested:
        return "a nested tensor, expected a dense one: call torch.nested.to_padded_tensor"
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype}), expected a plain one: call .dequantize()"
    if tensor.layout is not torch.strided:
        name = "sparse" if "sparse" in str(tensor.layout) else "packed"
        return f"a {name} tensor ({tensor.layout}), expected a dense one: call .to_dense()"
    return ""
