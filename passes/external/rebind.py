"""For a library that has no skip list: bind some of its names to other things while a function of it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

__all__ = ["rebound"]


@contextmanager
def rebound(names: Iterable[tuple[ModuleType | type, str, Any]]) -> Iterator[None]:
    """Inside the block, each (module or class, name) is bound to another value. Not for more than one thread."""
    before: list[tuple[ModuleType | type, str, Any]] = []
    try:
        for module, name, value in names:
            before.append((module, name, getattr(module, name)))
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in reversed(before):
            setattr(module, name, value)
