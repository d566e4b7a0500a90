"""Walk the caller's modules quickly, and run them as torch.export would.

torch's own walks build a name for each module, and a model of experts has 90,000.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["STANDARD", "as_exporting", "every_module", "every_path", "every_tensor"]


def every_module(model: nn.Module) -> list[nn.Module]:
    """`model` and the modules inside of it; one in two places is listed twice."""
    found = [model]
    for module in found:  # which grows meanwhile
        if module._modules:
            found += [child for child in module._modules.values() if child is not None]
    return found


def every_path(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of every place, in the order of the tree."""
    pending = [("", model)]
    while pending:
        path, module = pending.pop()
        yield path, module
        if module._modules:
            prefix = f"{path}." if path else ""
            children = reversed(module._modules.items())
            pending += [(prefix + name, child) for name, child in children if child is not None]


def every_tensor(model: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers; one in two places is listed twice."""
    found: list[torch.Tensor | None] = []
    for module in every_module(model):
        if module._parameters:
            found += module._parameters.values()
        if module._buffers:
            found += module._buffers.values()
    return [tensor for tensor in found if tensor is not None]


STANDARD = frozenset(vars(nn.Module()))
"""Attributes that every module has; none of them is a tensor."""


@contextmanager
def as_exporting() -> Iterator[None]:
    """Make `torch.compiler.is_exporting()` true, so that models run the branches that torch.export traces."""
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    before = {flag: getattr(torch.compiler, flag) for flag in flags if hasattr(torch.compiler, flag)}
    try:
        for flag in before:
            setattr(torch.compiler, flag, True)
        yield
    finally:
        for flag, value in before.items():
            setattr(torch.compiler, flag, value)
