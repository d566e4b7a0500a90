"""Running a model as torch.export would run it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["as_exporting"]


@contextmanager
def as_exporting() -> Iterator[None]:
    """Let models that ask `torch.compiler.is_exporting()` take the way that they take for torch.export."""
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    before = {flag: getattr(torch.compiler, flag) for flag in flags if hasattr(torch.compiler, flag)}
    try:
        for flag in before:
            setattr(torch.compiler, flag, True)
        yield
    finally:
        for flag, value in before.items():
            setattr(torch.compiler, flag, value)
