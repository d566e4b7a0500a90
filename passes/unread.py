"""What a recipe leaves out where weights are to stay unread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from passes.step import Composite, Repeat, Step

__all__ = ["sparing"]

JOINS_WEIGHTS: Final = {"onnxsim": ("fuse_attention",)}
"""Step → its inner passes that read weights by the gigabyte, to make new ones of them."""


def sparing(recipe: Sequence[Step | Repeat]) -> list[Step | Repeat]:
    """`recipe` without the inner passes that would join weights; each row of the report says what was left out."""
    return [
        Repeat(tuple(map(_spared, item.steps)), item.limit) if isinstance(item, Repeat) else _spared(item)
        for item in recipe
    ]


def _spared(step: Step) -> Step:
    left_out = JOINS_WEIGHTS.get(step.name, ())
    return step.without(left_out) if left_out and isinstance(step, Composite) else step
