"""Example arguments that are tensors of their own.

torch.export knows a tensor by its identity: traced with `(x, x)`, a model of two inputs becomes a program that reads
one of them twice, and with its own weight as an input, one that reads no weight. That is right for no other call.
"""

from __future__ import annotations

from typing import TypeGuard, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipeline.importers.from_torch.modules import every_tensor

__all__ = ["apart"]

T = TypeVar("T")


def apart(module: nn.Module, arguments: T) -> T:
    """`arguments`, where a tensor that shares memory with an earlier one, or with a weight, is a copy with its strides.

    The same object where no tensor does.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if _plain(leaf)]
    memories = {_memory(leaf) for leaf in tensors}
    held = {_memory(one) for one in every_tensor(module) if _plain(one)} if tensors else set()
    if len(memories) == len(tensors) and not memories & held:
        return arguments
    seen = set(held)

    def own(leaf: object) -> object:
        if not _plain(leaf):
            return leaf
        memory = _memory(leaf)
        if memory not in seen:
            seen.add(memory)
            return leaf
        return _copied(leaf)

    return pytree.tree_map(own, arguments)


def _plain(leaf: object) -> TypeGuard[torch.Tensor]:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_nested


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # an address would be 0 for everything on meta


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Its memory from the first element to the last, looked at with the same strides."""
    tensor = tensor.detach()
    if not tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)
