"""The arguments that a model is called with, as a flat list of tensors that can be left out one by one."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["Call"]


@dataclass(frozen=True, slots=True)
class Call:
    """`keys` numbers the leaves of (args, kwargs) as they are in the whole call; a part keeps the numbers."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    keys: tuple[int, ...]

    @staticmethod
    def of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """The whole call."""
        leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
        return Call(tuple(args), dict(kwargs), tuple(range(len(leaves))))

    def tensors(self) -> dict[int, torch.Tensor]:
        """{key: tensor}, in the order of the call."""
        leaves, _ = self.flat()
        return {key: leaf for key, leaf in zip(self.keys, leaves, strict=True) if isinstance(leaf, torch.Tensor)}

    def flat(self) -> tuple[tuple[Any, ...], pytree.TreeSpec]:
        """All leaves, and how they are arranged."""
        leaves, spec = pytree.tree_flatten((self.args, dict(self.kwargs)))
        return tuple(leaves), spec

    def renewed(self, tensors: Mapping[int, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """args and kwargs with other tensors, in new containers: a model may write into a list or a cache."""
        leaves, spec = self.flat()
        return pytree.tree_unflatten(
            [tensors.get(key, leaf) for key, leaf in zip(self.keys, leaves, strict=True)], spec
        )

    def spare(self, module: nn.Module) -> dict[int, str]:
        """{key: torch.export's name of it} of the tensors that the forward takes as `*inputs`: fewer will do."""
        takes = list(inspect.signature(module.forward).parameters.values())
        star = next((index for index, one in enumerate(takes) if one.kind is inspect.Parameter.VAR_POSITIONAL), None)
        if star is None:
            return {}
        return {
            self.keys[place]: f"{takes[star].name.lower()}_{index - star}"
            for index, (place, item) in enumerate(zip(self._places(), self.args, strict=True))
            if index >= star and isinstance(item, torch.Tensor)
        }

    def without(self, keys: Collection[int]) -> Call:
        """The call without some of those that `spare` names."""
        kept = [item for place, item in zip(self._places(), self.args, strict=True) if self.keys[place] not in keys]
        return Call(tuple(kept), self.kwargs, tuple(key for key in self.keys if key not in keys))

    def _places(self) -> list[int]:
        """Where the leaves of each positional argument begin."""
        return list(accumulate((len(pytree.tree_leaves(item)) for item in self.args[:-1]), initial=0))
