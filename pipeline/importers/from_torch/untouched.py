"""A caller's module stays as it was: what a run of it sets, adds or removes is undone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from pipeline.importers.from_torch.modules import every_module
from pipeline.importers.from_torch.tables import tables_kept

__all__ = ["untouched"]

Held = dict[str, Any]


@contextmanager
def untouched(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Afterwards each module in `module`, which are given, has the attributes, parameters, buffers and children that it
    had, by identity; and tables in reach of them hold the tensors that they held.

    (torch.export puts back attributes of modules, and not what a forward registers or keeps elsewhere.)
    """
    modules = every_module(module)
    with tables_kept(modules), _attributes_kept(modules):
        yield modules


@contextmanager
def _attributes_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    held = [part for one in modules for part in _held(one)]
    before = [part.copy() for part in held]
    try:
        yield
    finally:
        if _differ(held, before):
            for part, was in zip(held, before, strict=True):
                if _differ(part, was):
                    part.clear()
                    part.update(was)


def _held(module: nn.Module) -> tuple[Held, Held, Held, Held]:
    return vars(module), module._buffers, module._parameters, module._modules


def _differ(held: object, was: object) -> bool:
    try:
        return held != was  # by identity first: quick, where nothing has changed
    except Exception:  # tensors, and whatever else has no plain answer
        return True
