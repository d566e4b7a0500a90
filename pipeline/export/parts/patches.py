"""What a trace of a decoder needs otherwise than transformers has it. Each row is held by a test, which fails when the
library no longer needs the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final
from unittest.mock import patch

import torch


@dataclass(frozen=True, slots=True)
class TracePatch:
    """`make(original)` takes the place of the attribute `place` (module:Name.attribute) while a model is traced."""

    place: str
    make: Callable[[Any], Any]
    reason: str


PATCHES: Final[tuple[TracePatch, ...]] = ()


@contextmanager
def apply_patches() -> Iterator[None]:
    """Apply all patches inside a trace; nothing outside of one."""
    if not torch.compiler.is_exporting():
        yield
        return
    with ExitStack() as stack:
        for row in PATCHES:
            module, _, path = row.place.partition(":")
            *above, name = path.split(".")
            target = import_module(module)
            for part in above:
                target = getattr(target, part)
            stack.enter_context(patch.object(target, name, row.make(getattr(target, name))))
        yield
