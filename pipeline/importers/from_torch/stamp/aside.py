"""A run that leaves no trace on the caller's module: what `forward` sets or writes is undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipeline.importers.from_torch.modules import STANDARD, every_module

__all__ = ["set_aside"]

Held = dict[str, Any]


@contextmanager
def set_aside(module: nn.Module, blank: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """In here buffers, and tensors that are plain attributes, are what `blank` makes of them: a run may write to those.

    Afterwards every module has the attributes that it had, by identity; so also torch.export does it.
    """
    before = [(held, held.copy()) for one in every_module(module) for held in _held(one)]
    made: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = blank(tensor)
        return made[id(tensor)]

    try:
        for one in every_module(module):
            _replace(one._buffers, once)
            if len(vars(one)) > len(STANDARD):
                _replace(vars(one), once)
        yield
    finally:
        for held, was in before:
            if _differs(held, was):
                held.clear()
                held.update(was)


def _held(module: nn.Module) -> Iterator[Held]:
    yield vars(module)
    for held in (module._buffers, module._parameters, module._modules):
        if held:
            yield held


def _replace(held: Held, blank: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = [(name, item) for name, item in held.items() if isinstance(item, torch.Tensor)]
    held.update((name, blank(item)) for name, item in tensors)


def _differs(held: Held, was: Held) -> bool:
    try:
        return held != was  # by identity first: quick, where nothing has changed
    except Exception:  # tensors, and whatever else has no plain answer
        return True
