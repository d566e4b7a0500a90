"""The memory of tensors: which storage they use, copies with equal strides, whether two share a byte."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C._functorch import is_batchedtensor

__all__ = ["as_written", "copy_with_strides", "extent", "meet", "memory_of"]

Step = tuple[int, int, int]
"""How far one step goes, in bytes, and how many there are at least and at most."""


def memory_of(item: object) -> int | None:
    """Identify the storage of a tensor, also on meta, where every address is 0; None for what is no dense tensor."""
    if not isinstance(item, torch.Tensor) or item.layout is not torch.strided or item.is_nested:
        return None
    if is_batchedtensor(item):  # what vmap computes with while it is traced
        return None
    return item.untyped_storage()._cdata


def as_written(tensor: torch.Tensor) -> tuple[str, str]:
    """Sizes and strides as text: a comparison of symbols themselves would add guards on them."""
    return str(tuple(tensor.shape)), str(tensor.stride())


def copy_with_strides(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a dense tensor with the same strides, gaps between its elements included."""
    tensor = tensor.detach()
    if not tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    span = extent(tensor) // tensor.element_size()
    return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


def extent(tensor: torch.Tensor) -> int:
    """Bytes from where a dense tensor begins to the end of its last element; 0 where it has none."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def meet(one: torch.Tensor, other: torch.Tensor, distance: int) -> bool:
    """Whether two dense tensors share a byte, where `other` begins `distance` bytes after `one`.

    Exact, whatever the strides are: every second column and the columns between them do not meet.
    """
    if not -extent(other) < distance < extent(one):
        return False
    bounds = {1: [1 - other.element_size(), one.element_size() - 1]}
    for size, stride in _axes(one):
        bounds.setdefault(stride, [0, 0])[1] += size - 1
    for size, stride in _axes(other):
        bounds.setdefault(stride, [0, 0])[0] -= size - 1
    return _can_reach(distance, [(stride, low, high) for stride, (low, high) in sorted(bounds.items(), reverse=True)])


def _axes(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """(size, stride in bytes) of each axis whose stride is not 0."""
    width = tensor.element_size()
    return [(size, stride * width) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]


def _can_reach(distance: int, steps: Sequence[Step]) -> bool:
    """Whether some allowed number of each step adds up to `distance`. Long steps first: they leave few cases."""
    if not steps:
        return distance == 0
    (stride, low, high), *rest = steps
    least, most = (sum(step[0] * step[end] for step in rest) for end in (1, 2))
    first, last = max(low, -((most - distance) // stride)), min(high, (distance - least) // stride)
    return any(_can_reach(distance - count * stride, rest) for count in range(first, last + 1))
