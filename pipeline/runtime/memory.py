"""Tensors as a plan counts on them: their numbers in memory, in a certain order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["laid", "resolved", "room"]


def laid(tensor: torch.Tensor, strides: Sequence[int] | None) -> torch.Tensor:
    """`tensor` with exactly these strides, in elements, or row after row (None); its own bytes where they lie so.

    Axes of size 1 get the strides too: a convolution looks at all of them to tell channels_last.
    """
    tensor = resolved(tensor)
    if strides is None:
        return tensor.contiguous()
    if tensor.stride() == tuple(strides):
        return tensor
    if not tensor.numel() or _lies(tensor, strides):
        return tensor.as_strided(tensor.shape, strides)
    return room(tensor.shape, strides, tensor.dtype).copy_(tensor)


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Its numbers as they are in memory: `x.conj()` is a mere mark on those of `x`, and kernels read the memory."""
    return tensor.resolve_conj().resolve_neg()


def room(sizes: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor on the CPU that lies so."""
    return torch.empty(sizes, dtype=dtype) if strides is None else torch.empty_strided(sizes, strides, dtype=dtype)


def _lies(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    axes = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return all(size == 1 or own == wanted for size, own, wanted in axes)
