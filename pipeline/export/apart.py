"""Example arguments that are tensors of their own.

torch.export knows a tensor by its identity: traced with `(x, x)`, a model of two inputs becomes a program that reads
one of them twice, and with its own weight as an input, one that reads no weight. That is right for no other call.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from torch.utils import _pytree as pytree

from pipeline.importers.from_torch.memory import copy_as_it_lies, memory_of
from pipeline.importers.from_torch.modules import every_tensor

__all__ = ["apart"]

T = TypeVar("T")


def apart(module: nn.Module, arguments: T) -> T:
    """`arguments`, where a tensor that shares memory with an earlier one, or with a weight, is a copy with its strides.

    The same object where no tensor does.
    """
    memories = [memory for leaf in pytree.tree_leaves(arguments) if (memory := memory_of(leaf)) is not None]
    held = {memory_of(one) for one in every_tensor(module)} if memories else set()
    if len(set(memories)) == len(memories) and held.isdisjoint(memories):
        return arguments
    seen = set(held)

    def own(leaf: Any) -> Any:
        memory = memory_of(leaf)
        if memory is None or memory not in seen:
            seen.add(memory)
            return leaf
        return copy_as_it_lies(leaf)

    return pytree.tree_map(own, arguments)
