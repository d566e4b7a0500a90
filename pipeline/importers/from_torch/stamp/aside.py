"""A run that leaves no trace on the caller's module: what `forward` sets or writes is undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipeline.importers.from_torch.module_state import preserve_module_state
from pipeline.importers.from_torch.modules import STANDARD

__all__ = ["set_aside"]


@contextmanager
def set_aside(module: nn.Module, blank: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[dict[int, torch.Tensor]]:
    """In here buffers, and tensors that are plain attributes, are what `blank` makes of them: a run may write to those.

    Afterwards they are back, as whatever else a run may set on a module.

    Yields:
        {id of such a tensor: what stands in its place}.
    """
    made: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = blank(tensor)
        return made[id(tensor)]

    with preserve_module_state(module) as modules:
        for one in modules:
            if one._buffers:
                _replace(one._buffers, once)
            if len(vars(one)) > len(STANDARD):
                _replace(vars(one), once)
        yield made


def _replace(held: dict[str, Any], blank: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = [(name, item) for name, item in held.items() if isinstance(item, torch.Tensor)]
    held.update((name, blank(item)) for name, item in tensors)
