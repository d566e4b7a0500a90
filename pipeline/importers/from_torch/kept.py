"""A caller's module stays as it was: what a run of it sets, adds or removes is undone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["kept"]

Held = dict[str, Any]


@contextmanager
def kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Afterwards each of `modules` has the attributes, parameters, buffers and children that it had, by identity."""
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
